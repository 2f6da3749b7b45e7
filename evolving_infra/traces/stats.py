"""What a workload asks of a cluster, and what an unlimited cache would save."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from evolving_infra.traces.workload import (
    EDIT_BLOCKS,
    TraceRequest,
    Workload,
    extends,
    shared_prefix,
)
from evolving_infra.types import BranchKind

LONG_WAITS = (10, 60, 300)
"""Seconds; retention is judged on waits longer than these."""


@dataclass(frozen=True, kw_only=True)
class TraceStats:
    """Counts over a whole workload. Waits are the recorded pauses of a branch, in seconds.

    ``waits_over`` pairs a limit in seconds with the number of longer waits. ``ideal_hit`` is the
    share of input tokens that an unlimited cache holds when the requests come in trace order, by
    whole blocks. ``recorded_seconds`` is the length of the trace.
    """

    name: str
    requests: int
    input_tokens: int
    output_tokens: int
    branches: int
    forks: int
    subagents: int
    compactions: int
    edits: int
    waits: int
    wait_p50: float
    wait_p90: float
    waits_over: tuple[tuple[int, int], ...]
    longest_input: int
    ideal_hit: float
    recorded_seconds: float
    notes: tuple[str, ...]

    def to_text(self) -> str:
        """Lines for people, the name first."""
        over = ", ".join(f"{count} over {limit} s" for limit, count in self.waits_over)
        rows = {
            "requests": f"{self.requests:,}",
            "input tokens": f"{self.input_tokens:,} (longest {self.longest_input:,})",
            "output tokens": f"{self.output_tokens:,}",
            "branches": f"{self.branches} ({self.forks} forks, {self.subagents} sub-agents)",
            "compactions": f"{self.compactions}, and {self.edits} edits of the last blocks",
            "waits": f"{self.waits}: p50 {self.wait_p50:.1f} s, p90 {self.wait_p90:.1f} s, {over}",
            "length": f"{self.recorded_seconds:,.0f} s",
            "ideal hit rate": f"{self.ideal_hit * 100:.2f} %",
        }
        lines = [f"  {name:15} {value}" for name, value in rows.items()]
        return "\n".join([self.name, *lines, *(f"  note: {note}" for note in self.notes)])


def trace_stats(workload: Workload) -> TraceStats:
    """The statistics of a workload. O(all block ids)."""
    requests = workload.requests
    kinds = {request.branch: request.kind for request in requests}
    rewrites = _rewrites(workload)
    waits = _waits(workload)
    starts = workload.recorded_starts()
    inputs = sum(request.input_tokens for request in requests)
    reused = sum(reused_tokens(workload).values())
    return TraceStats(
        name=workload.name,
        notes=workload.notes,
        requests=len(requests),
        input_tokens=inputs,
        output_tokens=sum(request.output_tokens for request in requests),
        branches=len(kinds),
        forks=sum(kind is BranchKind.FORK for kind in kinds.values()),
        subagents=sum(kind is BranchKind.SUBAGENT for kind in kinds.values()),
        compactions=sum(dropped > EDIT_BLOCKS for dropped in rewrites),
        edits=sum(dropped <= EDIT_BLOCKS for dropped in rewrites),
        waits=len(waits),
        wait_p50=percentile(waits, 50),
        wait_p90=percentile(waits, 90),
        waits_over=tuple((limit, sum(wait > limit for wait in waits)) for limit in LONG_WAITS),
        longest_input=max((request.input_tokens for request in requests), default=0),
        ideal_hit=reused / inputs if inputs else 0.0,
        recorded_seconds=max(
            (starts[item.request] + (item.recorded_seconds or 0.0) for item in requests),
            default=0.0,
        ),
    )


def reused_tokens(workload: Workload) -> dict[str, int]:
    """Tokens of each request that an unlimited cache holds: ``min(block * matched, input)``."""
    cached: set[int] = set()
    size = Fraction(workload.block_size)
    reused: dict[str, int] = {}
    for request in workload.requests:
        ids = request.block_ids
        matched = next((i for i, block in enumerate(ids) if block not in cached), len(ids))
        reused[request.request] = min(int(matched * size), request.input_tokens)
        cached.update(ids)
    return reused


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear percentile; 0 of nothing."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100.0
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _rewrites(workload: Workload) -> list[int]:
    """Blocks dropped by each request that dropped complete blocks of its branch's context."""
    last: dict[str, TraceRequest] = {}
    dropped: list[int] = []
    for request in workload.requests:
        previous = last.get(request.branch)
        last[request.branch] = request
        if previous is None:
            continue
        blocks = workload.blocks_in(previous)
        if not extends(blocks, previous, request):
            kept = shared_prefix(previous.block_ids[:blocks], request.block_ids)
            dropped.append(blocks - kept)
    return dropped


def _waits(workload: Workload) -> list[float]:
    starts = workload.recorded_starts()
    last: dict[str, TraceRequest] = {}
    waits: list[float] = []
    for request in workload.requests:
        previous = last.get(request.branch)
        last[request.branch] = request
        if previous is not None:
            end = starts[previous.request] + (previous.recorded_seconds or 0.0)
            waits.append(max(0.0, starts[request.request] - end))
    return waits
