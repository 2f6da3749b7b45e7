"""What a recorded trace says, in one form for every format.

A workload is a family of branches. Its requests name blocks of context by id: an id stands for
``block_size`` tokens *and everything before them*, so equal ids mean an equal prefix. A request may
start when the trace has reached ``not_before`` and every dependency, plus its delay, has happened.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction

from evolving_infra.errors import wrong
from evolving_infra.types import BranchKind

EDIT_BLOCKS = 2
"""A rewrite that drops at most so many blocks of the tail is an edit, a larger one a compaction."""


class Trigger(str, Enum):
    """What must have happened to the request that is depended on."""

    COMPLETION = "completion"
    DISPATCH = "dispatch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependency:
    """Wait for ``trigger`` of ``request``, then ``delay`` seconds more (a tool, a person)."""

    request: str
    trigger: Trigger = Trigger.COMPLETION
    delay: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One model call. Times are seconds, whole microseconds.

    ``block_ids`` covers the prompt from its start and may leave its end uncovered.
    ``recorded_seconds`` is how long the call took when it was recorded.
    ``new_input`` is the kind of input that is new in this call (``tool_result``, ``text``, ...).
    """

    request: str
    branch: str
    parent_branch: str | None = None
    kind: BranchKind = BranchKind.ROOT
    version: int = 0
    model: str = ""
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()
    not_before: float = 0.0
    dependencies: tuple[Dependency, ...] = ()
    recorded_seconds: float | None = None
    new_input: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchEnd:
    """``branch`` has ended when all requests of ``after`` have completed."""

    branch: str
    after: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One trace. Requests are in trace order: dependencies and parents come first.

    ``block_size`` is tokens per block: an integer in a file, perhaps a fraction after scaling.
    ``notes`` says in sentences what the importer inferred, with counts.

    Raises:
        InputError: A request is out of order, twice there, or contradicts its branch.
    """

    name: str
    block_size: int | Fraction
    requests: tuple[TraceRequest, ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.block_size <= 0:
            raise wrong(f"{self.name}, block_size", "a positive number", self.block_size)
        seen: set[str] = set()
        first: dict[str, TraceRequest] = {}
        for request in self.requests:
            _check_request(self.name, request, seen)
            _check_branch(self.name, request, first)
            seen.add(request.request)

    def blocks_in(self, request: TraceRequest) -> int:
        """Complete blocks of the prompt that have an id."""
        return min(len(request.block_ids), int(request.input_tokens / Fraction(self.block_size)))

    def ends(self) -> tuple[BranchEnd, ...]:
        """When each branch ends: a root with its whole family, any other after its last request.

        A branch also outlives the first request of each of its children, which refers to it.
        """
        after: dict[str, list[str]] = {}
        parents: dict[str, str | None] = {}
        for request in self.requests:
            if request.branch not in parents:
                parents[request.branch] = request.parent_branch
                if request.parent_branch is not None:
                    after[request.parent_branch].append(request.request)
            after.setdefault(request.branch, []).append(request.request)
            root = _root(request.branch, parents)
            if root != request.branch and after[root][-1] != request.request:
                after[root].append(request.request)
        return tuple(BranchEnd(branch=name, after=tuple(names)) for name, names in after.items())

    def recorded_starts(self) -> dict[str, float]:
        """Start of every request in seconds when every call takes its recorded time."""
        starts: dict[str, float] = {}
        ends: dict[str, float] = {}
        for request in self.requests:
            start = request.not_before
            for needed in request.dependencies:
                moments = ends if needed.trigger is Trigger.COMPLETION else starts
                start = max(start, moments[needed.request] + needed.delay)
            starts[request.request] = start
            ends[request.request] = start + (request.recorded_seconds or 0.0)
        return starts


def extends(blocks: int, earlier: TraceRequest, later: TraceRequest) -> bool:
    """True if ``later`` still has the first ``blocks`` blocks of ``earlier``."""
    return earlier.block_ids[:blocks] == later.block_ids[:blocks]


def shared_prefix(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """Leading ids that are equal. O(length)."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


def whole_microseconds(seconds: float) -> float:
    """``seconds`` rounded so that milliseconds on disk give the same number back."""
    return round(seconds, 6)


def count_notes(counts: Mapping[str, int]) -> tuple[str, ...]:
    """``("forks inferred: 3", ...)``: what an importer inferred, without the zeros."""
    return tuple(f"{what}: {count}" for what, count in counts.items() if count)


def in_dependency_order(name: str, requests: Iterable[TraceRequest]) -> tuple[TraceRequest, ...]:
    """The requests, each as early as the given order and its dependencies allow.

    Raises:
        InputError: An id is used twice; a dependency is unknown or part of a cycle.
    """
    waiting = list(requests)
    known: set[str] = set()
    for request in waiting:
        if request.request in known:
            raise wrong(f"{name}, {request.request}", "a request id used once", request.request)
        known.add(request.request)
    done: dict[str, TraceRequest] = {}
    while waiting:
        blocked = []
        for request in waiting:
            for needed in request.dependencies:
                if needed.request not in known:
                    raise wrong(f"{name}, {request.request}", "a known request", needed.request)
            if all(needed.request in done for needed in request.dependencies):
                done[request.request] = request
            else:
                blocked.append(request)
        if len(blocked) == len(waiting):
            raise wrong(f"{name}, dependencies", "no cycle", blocked[0].request)
        waiting = blocked
    return tuple(done.values())


def _check_request(name: str, request: TraceRequest, seen: set[str]) -> None:
    where = f"{name}, {request.request}"
    if request.request in seen:
        raise wrong(where, "a request id used once", request.request)
    if request.input_tokens < 1:
        raise wrong(f"{where}, input tokens", "at least 1", request.input_tokens)
    if request.output_tokens < 0:
        raise wrong(f"{where}, output tokens", "at least 0", request.output_tokens)
    for needed in request.dependencies:
        if needed.request not in seen:
            raise wrong(f"{where}, dependencies", "an earlier request", needed.request)
        if needed.delay < 0:
            raise wrong(f"{where}, delay", "at least 0 s", needed.delay)


def _check_branch(name: str, request: TraceRequest, first: dict[str, TraceRequest]) -> None:
    where = f"{name}, {request.request}"
    if (request.parent_branch is None) != (request.kind is BranchKind.ROOT):
        raise wrong(f"{where}, parent branch", "one unless it is a root", request.parent_branch)
    opener = first.setdefault(request.branch, request)
    if opener is request and request.parent_branch not in (None, *first):
        raise wrong(f"{where}, parent branch", "an earlier branch", request.parent_branch)
    if (opener.kind, opener.parent_branch) != (request.kind, request.parent_branch):
        raise wrong(f"{where}, kind and parent", "those of its branch", request.kind.value)


def _root(branch: str, parents: Mapping[str, str | None]) -> str:
    while (parent := parents[branch]) is not None:
        branch = parent
    return branch
