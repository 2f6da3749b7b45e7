"""Giving a request to a node and taking it back; the branch's homes follow the KV."""

from evolving_infra.control.commands import Command, StartDecode, StartPrefill
from evolving_infra.control.nodes import Request
from evolving_infra.control.state import ControlState
from evolving_infra.types import Phase


def place_prefill(
    state: ControlState, request: Request, now: float, *, avoid: str | None = None
) -> list[Command]:
    """Queue the request where its predicted TTFT is least; without a node up it waits for one."""
    take_back(state, request)
    nodes = state.candidates(Phase.PREFILL, avoid=avoid)
    request.phase, request.source = Phase.PREFILL, None
    if not nodes:
        return []
    choice = state.router.prefill(request, nodes, now)
    request.service_seconds = choice.service_seconds
    _give(state, request, choice.node, now)
    branch = state.latest_branch(request)
    if branch is not None:
        state.counts.move(branch, Phase.PREFILL, choice.node)
    learned = state.times.is_learned(choice.node)
    return [
        StartPrefill(
            request=request.name,
            node=choice.node,
            fetches=choice.fetches,
            predicted_seconds=choice.ttft_seconds if learned else 0.0,
        )
    ]


def place_decode(
    state: ControlState, request: Request, source: str, now: float, *, avoid: str | None = None
) -> list[Command]:
    """Continue the request on a decode node, or on ``source`` if no node serves DECODE.

    If ``source``, whose KV the decode node needs, is down, the request is prefilled again.
    """
    if not state.nodes[source].is_up:
        return place_prefill(state, request, now, avoid=avoid)
    take_back(state, request)
    nodes = state.candidates(Phase.DECODE, avoid=avoid)
    if avoid != source:  # without a decode node, the source itself goes on
        nodes = [node for node in nodes if node.role.serves(Phase.DECODE)]
    branch = state.branches.find(request.branch)
    home = None if branch is None else branch.homes.get(Phase.DECODE)
    target = state.router.decode(request, nodes, home=home, source=source) if nodes else source
    request.phase, request.source = Phase.DECODE, source
    _give(state, request, target, now)
    settle_decode_home(state, request)
    return [StartDecode(request=request.name, node=target, source=source)]


def settle_decode_home(state: ControlState, request: Request) -> None:
    """The branch's decode home is where its latest request decodes, if that node serves DECODE.

    A node that gave up DECODE keeps no decode counts, not even of what still drains there.
    """
    branch = state.latest_branch(request)
    if branch is None or request.node is None or request.phase is not Phase.DECODE:
        return
    if state.nodes[request.node].role.serves(Phase.DECODE):
        state.counts.move(branch, Phase.DECODE, request.node)


def take_back(state: ControlState, request: Request) -> None:
    """The request is on no node any more."""
    if request.node is not None:
        del state.nodes[request.node].requests[request.name]
    request.node, request.running, request.recalled = None, False, False


def _give(state: ControlState, request: Request, node: str, now: float) -> None:
    request.node, request.running, request.since = node, False, now
    state.nodes[node].requests[request.name] = request
