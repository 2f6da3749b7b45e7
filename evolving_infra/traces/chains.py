"""Rebuilding branches from calls that were recorded flat, by their longest common prefix.

extends the last context of a chain that is idle       continuation
keeps a part of it, the rest is never used again       rewrite: the version rises
keeps a part of it, the rest is used again later       fork
keeps nothing of any idle chain of its model           fresh branch
"""

from collections.abc import Sequence
from dataclasses import dataclass

from evolving_infra.traces.workload import shared_prefix

SLACK_SECONDS = 1.0
"""Recorded starts are whole seconds, so a call may seem to start before its predecessor ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One recorded model call. ``start`` and ``end`` are seconds since the trace began.

    ``context`` holds the ids of the complete blocks of the prompt, ``think`` the recorded wait
    before the call.
    """

    start: float
    seconds: float | None
    think: float | None
    model: str
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]
    context: tuple[int, ...]
    stopped_for_tool: bool
    new_input: str | None

    @property
    def end(self) -> float:
        return self.start + (self.seconds or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a call belongs: its chain, the call before it there, and its context version.

    The first call of a chain has no ``previous``; it is a fork if it has an ``origin``, the call
    whose context it shares. ``dropped`` is how many blocks of the previous context are gone.
    """

    chain: int
    previous: int | None = None
    version: int = 0
    dropped: int = 0
    origin: int | None = None


def rebuild(calls: Sequence[Call]) -> tuple[Place, ...]:
    """Place every call, in start order. O(calls * chains * blocks)."""
    places: list[Place] = []
    tails: list[int] = []
    for index, call in enumerate(calls):
        idle = [tail for tail in tails if _may_follow(calls[tail], call)]
        place = _continued(calls, index, idle, places)
        if place is None:
            place = Place(chain=len(tails), origin=_origin(calls, index))
            tails.append(index)
        tails[place.chain] = index
        places.append(place)
    return tuple(places)


def _may_follow(tail: Call, call: Call) -> bool:
    return tail.model == call.model and tail.end <= call.start + SLACK_SECONDS


def _continued(
    calls: Sequence[Call], index: int, idle: Sequence[int], places: Sequence[Place]
) -> Place | None:
    """The chain that this call appends to or rewrites, if there is one."""
    if not idle:
        return None
    kept = {tail: shared_prefix(calls[tail].context, calls[index].context) for tail in idle}
    whole = [tail for tail in idle if kept[tail] == len(calls[tail].context)]
    tail = max(whole or idle, key=lambda at: (kept[at], at))
    dropped = len(calls[tail].context) - kept[tail]
    if dropped and _used_again(calls, index, calls[tail], kept[tail]):
        return None
    return Place(
        chain=places[tail].chain,
        previous=tail,
        version=places[tail].version + (dropped > 0),
        dropped=dropped,
    )


def _used_again(calls: Sequence[Call], index: int, tail: Call, kept: int) -> bool:
    """True if a later call has more of ``tail`` than its first ``kept`` blocks."""
    more = tail.context[: kept + 1]
    later = (call for call in calls[index + 1 :] if call.model == tail.model)
    return any(call.context[: kept + 1] == more for call in later)


def _origin(calls: Sequence[Call], index: int) -> int | None:
    """The earlier call of the same model that shares the most blocks.

    Of equals one that had ended, and of these the latest.
    """
    call = calls[index]
    earlier = [at for at in range(index) if calls[at].model == call.model]
    shared = {at: shared_prefix(calls[at].context, call.context) for at in earlier}
    best = max(earlier, key=lambda at: (shared[at], _may_follow(calls[at], call), at), default=None)
    return best if best is not None and shared[best] > 0 else None
