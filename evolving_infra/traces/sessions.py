"""Branches of a file that only names sessions: one branch a session, parents by spawn."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from evolving_infra.traces.workload import EDIT_BLOCKS, TraceRequest, extends
from evolving_infra.types import BranchKind


def infer_branches(
    requests: Sequence[TraceRequest],
    block_size: int,
    spawns: Mapping[str, str | None],
    counts: Counter[str],
) -> tuple[TraceRequest, ...]:
    """Give every request parent, kind and version. ``spawns`` maps a request to its spawner.

    A spawned session that still has all complete blocks of its spawner is a fork, any other a
    sub-agent; a request that drops complete blocks of the one before raises the version.
    """
    by_name: dict[str, TraceRequest] = {}
    last: dict[str, TraceRequest] = {}
    for request in requests:
        previous = last.get(request.branch)
        if previous is None:
            spawner = spawns[request.request]
            inferred = request
            if spawner is not None and by_name[spawner].branch != request.branch:
                inferred = _spawned(request, by_name[spawner], block_size)
                counts[f"{inferred.kind.value} branches inferred"] += 1
        else:
            inferred = _continued(request, previous, block_size, counts)
        by_name[request.request] = last[request.branch] = inferred
    return tuple(by_name.values())


def _spawned(request: TraceRequest, spawner: TraceRequest, block_size: int) -> TraceRequest:
    blocks = _blocks(spawner, block_size)
    fork = blocks > 0 and extends(blocks, spawner, request)
    kind = BranchKind.FORK if fork else BranchKind.SUBAGENT
    return replace(request, parent_branch=spawner.branch, kind=kind)


def _continued(
    request: TraceRequest, previous: TraceRequest, block_size: int, counts: Counter[str]
) -> TraceRequest:
    blocks = _blocks(previous, block_size)
    rewritten = not extends(blocks, previous, request)
    if rewritten:
        edit = extends(max(0, blocks - EDIT_BLOCKS), previous, request)
        counts["edits of the last blocks inferred" if edit else "compactions inferred"] += 1
    return replace(
        request,
        parent_branch=previous.parent_branch,
        kind=previous.kind,
        version=previous.version + rewritten,
    )


def _blocks(request: TraceRequest, block_size: int) -> int:
    return min(len(request.block_ids), request.input_tokens // block_size)
