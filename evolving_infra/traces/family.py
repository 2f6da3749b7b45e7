"""From streams of calls to requests with branches and dependencies.

A stream is what one agent sent: the main agent's calls, or a sub-agent's. Inside it, ``chains``
finds the branches. Between branches there are spawns (the first call of a branch waits for a call
of its parent) and joins (the parent's next call waits for the last call of the branch).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from evolving_infra.traces.chains import SLACK_SECONDS, Call, Place, rebuild
from evolving_infra.traces.workload import (
    EDIT_BLOCKS,
    Dependency,
    TraceRequest,
    Trigger,
    in_dependency_order,
    whole_microseconds,
)
from evolving_infra.types import BranchKind


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Calls of one agent in start order. ``joins``: its parent waits for its end."""

    name: str
    calls: tuple[Call, ...]
    subagent: bool = False
    joins: bool = True


@dataclass(eq=False, kw_only=True)
class _Branch:
    name: str
    joins: bool
    steps: list["_Step"] = field(default_factory=list)
    kind: BranchKind = BranchKind.ROOT
    spawner: "_Step | None" = None


@dataclass(eq=False, kw_only=True)
class _Step:
    """A call on its way to becoming a request. ``index`` counts the calls of its stream."""

    request: str
    index: int
    call: Call
    place: Place
    branch: _Branch
    joined: list["_Step"] = field(default_factory=list)


def build(where: str, streams: Sequence[Stream], counts: Counter[str]) -> tuple[TraceRequest, ...]:
    """Requests of a whole trace; the first stream is the main agent's. Counts what it inferred."""
    steps: list[_Step] = []
    main: list[_Step] = []
    for stream in streams:
        own = _steps(stream, counts)
        if stream.subagent:
            _spawn(own[0], BranchKind.SUBAGENT, main)
        else:
            main = own
        _spawn_chains(own, counts)
        steps += own
    for branch in {id(step.branch): step.branch for step in steps}.values():
        _join(branch)
    ordered = sorted(steps, key=lambda step: step.call.start)
    return in_dependency_order(where, [_request(step) for step in ordered])


def _steps(stream: Stream, counts: Counter[str]) -> list[_Step]:
    steps: list[_Step] = []
    branches: list[_Branch] = []
    for index, (call, place) in enumerate(zip(stream.calls, rebuild(stream.calls), strict=True)):
        if place.chain == len(branches):
            name = stream.name if place.chain == 0 else f"{stream.name}.{place.chain}"
            branches.append(_Branch(name=name, joins=stream.joins or place.chain > 0))
        branch = branches[place.chain]
        step = _Step(
            request=f"{stream.name}-{index}", index=index, call=call, place=place, branch=branch
        )
        branch.steps.append(step)
        steps.append(step)
        if place.dropped:
            edit = place.dropped <= EDIT_BLOCKS
            counts["edits of the last blocks inferred" if edit else "compactions inferred"] += 1
    return steps


def _spawn_chains(steps: Sequence[_Step], counts: Counter[str]) -> None:
    """Hang every later chain of a stream on the call it comes from."""
    for index, step in enumerate(steps):
        if step.place.chain == 0 or step.place.previous is not None:
            continue
        if step.place.origin is not None:
            counts["forks inferred"] += 1
            _spawn(step, BranchKind.FORK, steps[step.place.origin : step.place.origin + 1])
        else:
            counts["fresh branches inferred"] += 1
            main = [other for other in steps[:index] if other.place.chain == 0]
            _spawn(step, BranchKind.SUBAGENT, main)


def _spawn(step: _Step, kind: BranchKind, candidates: Sequence[_Step]) -> None:
    """Make the branch that starts with ``step`` a child of the last call sent before it.

    Without such a call it stays a root of its own.
    """
    before = [other for other in candidates if other.call.start <= step.call.start]
    if before:
        step.branch.kind = kind
        step.branch.spawner = before[-1]


def _join(branch: _Branch) -> None:
    """The next call after the end of the branch, of its parent or further up, waits for it."""
    last = branch.steps[-1]
    while branch.spawner is not None and branch.joins:
        parent = branch.spawner.branch
        later = parent.steps[parent.steps.index(branch.spawner) + 1 :]
        waiting = next((step for step in later if step.call.start >= last.call.end), None)
        if waiting is not None:
            waiting.joined.append(last)
            return
        branch = parent


def _request(step: _Step) -> TraceRequest:
    branch, call = step.branch, step.call
    dependencies = _dependencies(step)
    parent = branch.spawner.branch.name if branch.spawner else None
    return TraceRequest(
        request=step.request,
        branch=branch.name,
        parent_branch=parent,
        kind=branch.kind,
        version=step.place.version,
        model=call.model,
        input_tokens=call.input_tokens,
        output_tokens=call.output_tokens,
        block_ids=call.block_ids,
        not_before=0.0 if dependencies else whole_microseconds(call.start),
        dependencies=dependencies,
        recorded_seconds=None if call.seconds is None else whole_microseconds(call.seconds),
        new_input=call.new_input,
    )


def _dependencies(step: _Step) -> tuple[Dependency, ...]:
    position = step.branch.steps.index(step)
    if position == 0:
        return () if step.branch.spawner is None else (_wait(step.branch.spawner, step),)
    previous = step.branch.steps[position - 1]
    joins = [_wait(other, step) for other in step.joined]
    if joins:
        # The recorded wait was for the sub-agents: what is left of it counts from their end.
        return (Dependency(request=previous.request), *joins)
    wait = _wait(previous, step)
    if step.call.think is not None and step.index == previous.index + 1:
        # ``think`` counts from the call recorded before, which is the one before in the branch.
        wait = Dependency(request=previous.request, delay=whole_microseconds(step.call.think))
    return (wait,)


def _wait(earlier: _Step, step: _Step) -> Dependency:
    """Wait for the end of ``earlier``, or, if it was still running, for its dispatch."""
    running = earlier.call.end > step.call.start + SLACK_SECONDS
    moment = earlier.call.start if running else earlier.call.end
    return Dependency(
        request=earlier.request,
        trigger=Trigger.DISPATCH if running else Trigger.COMPLETION,
        delay=whole_microseconds(max(0.0, step.call.start - moment)),
    )
