"""Nodes that come, go, change their role, or say what they hold and how long they took."""

from evolving_infra.control.commands import Command, RoleChanged, Withdraw
from evolving_infra.control.events import (
    BlocksRemoved,
    BlocksStored,
    DecodeMeasured,
    FetchMeasured,
    NodeJoined,
    NodeLost,
    PrefillMeasured,
    RoleAsked,
    StoreLost,
)
from evolving_infra.control.homecoming import bring_home, bring_late
from evolving_infra.control.iteration_time import check_amounts
from evolving_infra.control.nodes import Node
from evolving_infra.control.placement import place_prefill, take_back
from evolving_infra.control.state import ControlState
from evolving_infra.errors import StateError, wrong
from evolving_infra.types import Tier


def joined(state: ControlState, event: NodeJoined, now: float) -> list[Command]:
    """A node is up. One that was lost keeps the role it had; what waited for a node is placed.

    Raises:
        InputError: a size is not positive, or ``page_size`` differs from that of the cluster.
        StateError: the node is up already.
    """
    _check_join(state, event)
    known = state.nodes.get(event.node)
    state.nodes[event.node] = Node(
        name=event.node,
        role=event.role if known is None else known.role,
        page_size=event.page_size,
        l1_blocks=event.l1_blocks,
        l2_blocks=event.l2_blocks,
    )
    state.directory.drop_node_tier(event.node, Tier.L1)
    commands: list[Command] = []
    for request in [r for r in state.requests.values() if r.node is None]:
        commands += place_prefill(state, request, now)
    return commands


def lost(state: ControlState, event: NodeLost, now: float) -> list[Command]:
    """The engine is gone: its requests start anew elsewhere, or wait if no node is up.

    ``InputError`` if the node is unknown, ``StateError`` if it is down already.
    """
    node = state.node(event.node)
    if not node.is_up:
        raise StateError(f"node {event.node!r} is down already")
    node.is_up = False
    state.directory.drop_node_tier(event.node, Tier.L1)
    commands: list[Command] = []
    for request in list(node.requests.values()):
        take_back(state, request)
        commands += place_prefill(state, request, now)
    return commands


def store_lost(state: ControlState, event: StoreLost, now: float) -> list[Command]:
    """The node's host pool is gone. Legal for a node that has not joined: its store came first."""
    state.directory.drop_node_tier(event.node, Tier.L2)
    return []


def stored(state: ControlState, event: BlocksStored, now: float) -> list[Command]:
    """Copies appeared; some idle branch may have waited for them.

    Host memory may be filled before the engine is up; ``StateError`` for L1 of a node that is down.
    """
    _check_tier(state, event)
    state.directory.store(event.node, event.tier, event.keys)
    return bring_late(state, event.node, event.keys) if event.tier is Tier.L2 else []


def removed(state: ControlState, event: BlocksRemoved, now: float) -> list[Command]:
    """Copies were evicted. ``StateError`` for L1 of a node that is down."""
    _check_tier(state, event)
    state.directory.remove(event.node, event.tier, event.keys)
    return []


def role_asked(state: ControlState, event: RoleAsked, now: float) -> list[Command]:
    """Change what the node gets from now on; running requests finish in place, queued ones move.

    Never refused: even the last prefill node may become a decode node, because engines are
    symmetric and ``ControlState.candidates`` then falls back. ``InputError`` if it is unknown.
    """
    node = state.node(event.node)
    before, after = node.role, event.role
    if before is after:
        return []
    node.role = after
    stripped = state.counts.change_role(state.branches.active(), node.name, after)
    commands: list[Command] = [RoleChanged(node=node.name, before=before, after=after)]
    for request in node.queued():
        if not after.serves(request.phase):
            request.recalled = True
            commands.append(Withdraw(request=request.name, node=node.name, phase=request.phase))
    for branch in stripped:
        commands += bring_home(state, branch)
    return commands


def prefill_measured(state: ControlState, event: PrefillMeasured, now: float) -> list[Command]:
    """Learn from one iteration. ``InputError`` if an amount is negative or the node unknown."""
    state.node(event.node)
    work = (event.uncached_tokens, event.pairs, event.restored_tokens)
    check_amounts(
        seconds=event.seconds,
        uncached_tokens=event.uncached_tokens,
        pairs=event.pairs,
        restored_tokens=event.restored_tokens,
    )
    state.times.observe_prefill(event.node, event.seconds, work, now)
    return []


def decode_measured(state: ControlState, event: DecodeMeasured, now: float) -> list[Command]:
    """Learn from one iteration. ``InputError`` if an amount is negative or the node unknown."""
    state.node(event.node)
    check_amounts(seconds=event.seconds, running=event.running, context_tokens=event.context_tokens)
    state.times.observe_decode(event.node, event.seconds, event.running, now)
    return []


def fetch_measured(state: ControlState, event: FetchMeasured, now: float) -> list[Command]:
    """Learn from one fetch. ``InputError`` if an amount is negative. The node may be unknown:
    its store can be up before its engine."""
    check_amounts(seconds=event.seconds, blocks=event.blocks)
    state.times.observe_fetch(event.seconds, event.blocks, now)
    return []


def _check_join(state: ControlState, event: NodeJoined) -> None:
    for name in ("page_size", "l1_blocks", "l2_blocks"):
        if getattr(event, name) < 1:
            raise wrong(name, "a positive number", getattr(event, name))
    for node in state.nodes.values():
        if node.name == event.node and node.is_up:
            raise StateError(f"node {event.node!r} is up already")
        if node.name != event.node and node.page_size != event.page_size:
            raise wrong("page_size", f"{node.page_size}, as {node.name} has", event.page_size)


def _check_tier(state: ControlState, event: BlocksStored | BlocksRemoved) -> None:
    node = state.nodes.get(event.node)
    if event.tier is Tier.L1 and (node is None or not node.is_up):
        raise StateError(f"node {event.node!r} is not up: it has no device blocks")
