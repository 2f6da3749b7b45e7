"""The life of a request: arrived → prefill queued → running → decode queued → running → over.

Each handler checks first and changes the state only if the event is legal.
"""

from evolving_infra.control.commands import Cancel, Command
from evolving_infra.control.events import (
    PrefillDone,
    RequestAborted,
    RequestArrived,
    RequestBounced,
    RequestFinished,
    RequestStarted,
)
from evolving_infra.control.homecoming import bring_home
from evolving_infra.control.iteration_time import check_amounts
from evolving_infra.control.nodes import Request
from evolving_infra.control.placement import (
    place_decode,
    place_prefill,
    settle_decode_home,
    take_back,
)
from evolving_infra.control.state import ControlState
from evolving_infra.errors import CapacityError, StateError, wrong
from evolving_infra.types import Phase

MAX_BOUNCES = 16
"""Placements a request may be refused before it is an error, so that no bounce goes on for ever."""


def arrived(state: ControlState, event: RequestArrived, now: float) -> list[Command]:
    """Place a new request; its branch's context is now its prompt.

    Raises:
        InputError: a field is wrong; see also ``BranchTree.check_arrival``.
        StateError: the request's id is in use or its branch has ended.
        CapacityError: no node is up.
    """
    _check_arrival(state, event)
    branch = state.branches.arrive(event, now)
    state.wants.drop(branch.name)
    state.counts.set_chain(branch, event.prompt_keys)
    request = Request(
        name=event.request,
        branch=event.branch,
        prompt_keys=event.prompt_keys,
        prompt_tokens=event.prompt_tokens,
        max_tokens=event.max_tokens,
    )
    state.requests[request.name] = request
    return place_prefill(state, request, now)


def started(state: ControlState, event: RequestStarted, now: float) -> list[Command]:
    """The request waits no longer. ``StateError`` unless it is queued there in this phase."""
    request = _placed(state, event.request, event.node, event.phase)
    if request.running:
        raise StateError(f"request {event.request!r} runs already")
    request.running, request.since = True, now
    return []


def prefill_done(state: ControlState, event: PrefillDone, now: float) -> list[Command]:
    """Choose where it decodes. ``StateError`` unless it is in prefill on this node."""
    check_amounts(cached_tokens=event.cached_tokens, restored_tokens=event.restored_tokens)
    request = _placed(state, event.request, event.node, Phase.PREFILL)
    return place_decode(state, request, event.node, now)


def finished(state: ControlState, event: RequestFinished, now: float) -> list[Command]:
    """The branch's context grows by the output; bring it home while the branch is idle.

    Legal in every phase: one output token needs no decode. ``StateError`` if it is not live.
    """
    check_amounts(output_tokens=event.output_tokens)
    request = _live(state, event.request)
    branch = state.latest_branch(request)
    if branch is not None:
        state.counts.set_chain(branch, event.keys)
        settle_decode_home(state, request)
    _close(state, request, now)
    return [] if branch is None else bring_home(state, branch)


def aborted(state: ControlState, event: RequestAborted, now: float) -> list[Command]:
    """Stop it wherever it holds something. ``StateError`` if it is not live."""
    request = _live(state, event.request)
    holders = [request.node]
    if request.phase is Phase.DECODE and not request.running and request.source != request.node:
        holders.append(request.source)  # the hand-off may not have happened yet
    _close(state, request, now)
    return [Cancel(request=request.name, node=node) for node in holders if node is not None]


def bounced(state: ControlState, event: RequestBounced, now: float) -> list[Command]:
    """Place the request again, on another node if one is up.

    A role change that recalled it does not count, else ``StateError`` if it bounced
    ``MAX_BOUNCES`` times. ``StateError``, too, unless it is there in this phase.
    """
    request = _placed(state, event.request, event.node, event.phase)
    if not request.recalled:
        if request.bounces == MAX_BOUNCES:
            raise StateError(f"request {event.request!r} was refused {MAX_BOUNCES} times: give up")
        request.bounces += 1
    if event.phase is Phase.DECODE:
        assert request.source is not None, "a decode has the node of its prefill"
        return place_decode(state, request, request.source, now, avoid=event.node)
    return place_prefill(state, request, now, avoid=event.node)


def _check_arrival(state: ControlState, event: RequestArrived) -> None:
    if event.prompt_tokens < 1:
        raise wrong("prompt_tokens", "1 or more", event.prompt_tokens)
    if event.max_tokens < 1:
        raise wrong("max_tokens", "1 or more", event.max_tokens)
    for node in state.nodes.values():
        if len(event.prompt_keys) > event.prompt_tokens // node.page_size:
            raise wrong(
                "prompt_keys",
                f"at most {event.prompt_tokens // node.page_size} complete blocks",
                len(event.prompt_keys),
            )
    state.branches.check_arrival(event)
    if event.request in state.requests:
        raise StateError(f"request {event.request!r} is live already")
    if not state.candidates(Phase.PREFILL):
        raise CapacityError("no node is up")


def _live(state: ControlState, name: str) -> Request:
    request = state.requests.get(name)
    if request is None:
        raise StateError(f"request {name!r} is not live")
    return request


def _placed(state: ControlState, name: str, node: str, phase: Phase) -> Request:
    request = _live(state, name)
    if request.node != node or request.phase is not phase:
        where = f"in {request.phase.value} on {request.node}"
        raise StateError(f"request {name!r} is {where}, not in {phase.value} on {node}")
    return request


def _close(state: ControlState, request: Request, now: float) -> None:
    take_back(state, request)
    del state.requests[request.name]
    state.branches.leave(request.branch, now)
