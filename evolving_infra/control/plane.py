"""The control plane: events in, commands out.

    handle(event, now) -> [Command]    changes the state, or raises and changes nothing
    next_timer() -> seconds            when a TimerDue is due
    check()                            recounts everything

There is no clock, I/O or randomness inside, and every tie ends in an id: the same events at the
same times give the same commands, in a server, in a simulator and in a replay of the journal.
"""

from collections.abc import Callable
from typing import Any

from evolving_infra.config import ControlConfig
from evolving_infra.control import branch_events, node_events, request_events
from evolving_infra.control import events as ev
from evolving_infra.control.commands import Command, SetCounted
from evolving_infra.control.nodes import Node, NodeView, RequestView
from evolving_infra.control.state import ControlState
from evolving_infra.errors import StateError, wrong
from evolving_infra.types import BlockKey, Phase, Role, Tier

Handler = Callable[[ControlState, Any, float], list[Command]]

HANDLERS: dict[type, Handler] = {
    ev.NodeJoined: node_events.joined,
    ev.NodeLost: node_events.lost,
    ev.StoreLost: node_events.store_lost,
    ev.BlocksStored: node_events.stored,
    ev.BlocksRemoved: node_events.removed,
    ev.RequestArrived: request_events.arrived,
    ev.RequestStarted: request_events.started,
    ev.PrefillDone: request_events.prefill_done,
    ev.RequestFinished: request_events.finished,
    ev.RequestAborted: request_events.aborted,
    ev.RequestBounced: request_events.bounced,
    ev.BranchEnded: branch_events.ended,
    ev.RoleAsked: node_events.role_asked,
    ev.PrefillMeasured: node_events.prefill_measured,
    ev.DecodeMeasured: node_events.decode_measured,
    ev.FetchMeasured: node_events.fetch_measured,
    ev.TimerDue: branch_events.timer_due,
}


class ControlPlane:
    """All decisions of one cluster (design section 7)."""

    def __init__(self, config: ControlConfig) -> None:
        self._state = ControlState(config)
        self._now = float("-inf")

    def handle(self, event: ev.Event, now: float) -> list[Command]:
        """Take in one event. ``now`` is seconds since any fixed start.

        Changed counts come first, so that a store protects blocks before a request needs them.

        Raises:
            InputError: the event is wrong: it names field, expected and got.
            StateError: the event is not legal now, or time went back. Nothing has changed.
        """
        if not now >= self._now:
            raise StateError(f"time goes back: {now} s after {self._now} s")
        handler = HANDLERS.get(type(event))
        if handler is None:
            raise wrong("event", "one of control.events.Event", event)
        commands = handler(self._state, event, now)
        self._now = now
        counted: list[Command] = [
            SetCounted(node=change.node, counted=change.counted, uncounted=change.uncounted)
            for change in self._state.counts.take_transitions()
        ]
        return counted + commands

    def next_timer(self) -> float | None:
        """When ``TimerDue`` is due, in the seconds of ``now``; None: never. O(1)."""
        return branch_events.next_expiry(self._state)

    def check(self) -> None:
        """Recount everything; an ``AssertionError`` is a bug here. O(everything)."""
        self._state.check()

    def nodes(self) -> tuple[NodeView, ...]:
        """Every node that ever joined, by id."""
        return tuple(self._view(node) for _, node in sorted(self._state.nodes.items()))

    def known_role(self, node: str) -> Role | None:
        """The node's role, None if it never joined. It outlives the loss of the node."""
        known = self._state.nodes.get(node)
        return None if known is None else known.role

    def role(self, node: str) -> Role:
        """The node's role. ``InputError`` if it never joined."""
        return self._state.node(node).role

    def keys_at(self, node: str) -> frozenset[BlockKey]:
        """Blocks readable in the node's host memory. O(blocks)."""
        return self._state.directory.keys_at(node, Tier.L2)

    def counted_at(self, node: str) -> tuple[BlockKey, ...]:
        """Blocks that active branches need at ``node``: what its store and its
        engine must be told when they (re)connect: commands only tell changes."""
        return tuple(self._state.counts.counted(node))

    def count(self, node: str, key: BlockKey) -> int:
        """Active branches that need the block at ``node``, summed over phases."""
        return self._state.counts.count(node, key)

    def branch_count(self) -> int:
        """Active branches."""
        return len(self._state.branches)

    def homes(self, branch: str) -> dict[Phase, str]:
        """Where the branch's KV is counted, by phase; empty if it is not active."""
        found = self._state.branches.find(branch)
        return {} if found is None else dict(found.homes)

    def request(self, name: str) -> RequestView | None:
        """A live request, None if there is none of this id."""
        request = self._state.requests.get(name)
        if request is None:
            return None
        return RequestView(
            name=request.name,
            branch=request.branch,
            phase=request.phase,
            node=request.node,
            running=request.running,
        )

    def _view(self, node: Node) -> NodeView:
        directory = self._state.directory
        running = [request for request in node.requests.values() if request.running]
        return NodeView(
            name=node.name,
            role=node.role,
            is_up=node.is_up,
            queued=len(node.queued()),
            prefilling=sum(request.phase is Phase.PREFILL for request in running),
            decoding=sum(request.phase is Phase.DECODE for request in running),
            l1_held_blocks=directory.count(node.name, Tier.L1),
            l2_held_blocks=directory.count(node.name, Tier.L2),
            counted_blocks=self._state.counts.num_counted(node.name),
        )
