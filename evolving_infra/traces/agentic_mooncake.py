"""Dynamo's agentic_mooncake v2: JSON lines, a header and one row a request; reader and writer.

Beyond the schema, a row may carry ``branch_id, parent_branch_id, branch_kind, context_version`` and
``new_input``, and the header ``notes``: with them a workload comes back exactly as it was written.
Without them a session is a branch, its parent is where it was spawned, and versions are inferred.
"""

import json
from collections import Counter
from fractions import Fraction
from pathlib import Path, PurePath
from typing import Any

from evolving_infra.errors import InputError, wrong
from evolving_infra.traces.fields import Fields
from evolving_infra.traces.rows import rows
from evolving_infra.traces.sessions import infer_branches
from evolving_infra.traces.workload import (
    Dependency,
    TraceRequest,
    Trigger,
    Workload,
    count_notes,
    in_dependency_order,
    whole_microseconds,
)
from evolving_infra.types import BranchKind

SCHEMA = "dynamo.agentic_mooncake"
VERSION = 2
KINDS = tuple(kind.value for kind in BranchKind)
RELATIONS = ("sequence", "spawn", "join", "replay_barrier")


def read_agentic_mooncake(where: str, text: str) -> Workload:
    """The workload of one file's text. ``where`` names the file in errors.

    Raises:
        InputError: A line is not JSON, a field is missing, unknown or wrong, or a cycle is there.
    """
    header, *lines = rows(where, text)
    header.choice("schema", (SCHEMA,))
    if header.integer("version") != VERSION:
        raise header.wrong("version", str(VERSION), header.any("version"))
    header.choice("hash_id_scope", ("local",))
    header.ignore("source")
    notes = tuple(str(note) for note in header.items("notes")) if header.has("notes") else ()
    header.ignore("notes")
    block_size = header.integer("block_size", 1)
    header.finish()
    if not lines:
        raise wrong(where, "at least one request", "only a header")
    plays = {row.text("play_id") for row in lines}
    requests, spawns = [], {}
    for row in lines:
        request, spawn = _request(row)
        requests.append(request)
        spawns[request.request] = spawn
    ordered = in_dependency_order(where, requests)
    counts: Counter[str] = Counter()
    if not any(row.has("branch_id") for row in lines):
        ordered = infer_branches(ordered, block_size, spawns, counts)
    name = plays.pop() if len(plays) == 1 else PurePath(where).stem
    return Workload(
        name=name, block_size=block_size, requests=ordered, notes=notes + count_notes(counts)
    )


def write_agentic_mooncake(workload: Workload, origin: str = "", digest: str = "") -> str:
    """The text of a file. ``origin`` and ``digest`` say in ``source`` what it was made from.

    Raises:
        InputError: The workload is scaled so that a block is not a whole number of tokens.
    """
    size = Fraction(workload.block_size)
    if size.denominator != 1:
        raise wrong("block_size", "a whole number of tokens", str(size))
    header = {
        "schema": SCHEMA,
        "version": VERSION,
        "block_size": int(size),
        "hash_id_scope": "local",
        "source": {"format": origin, "digest": digest},
        "notes": list(workload.notes),
    }
    branches = {request.request: request.branch for request in workload.requests}
    lines = [header, *(_row(workload.name, request, branches) for request in workload.requests)]
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)


def write(workload: Workload, path: Path) -> None:
    """Write the workload to a file. ``InputError`` if its blocks are not whole, or it can't be."""
    text = write_agentic_mooncake(workload)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: expected a writable file, got: {error.strerror}") from None


def _request(row: Fields) -> tuple[TraceRequest, str | None]:
    """A request and, if it was spawned, the request that spawned it."""
    session, branch = row.text("session_id"), row.optional_text("branch_id")
    kind = row.choice("branch_kind", KINDS) if row.has("branch_kind") else BranchKind.ROOT.value
    recorded = row.optional_number("recorded_api_time_ms")
    row.ignore("branch_kind", "play_id", "source_play_ordinal", "replay_key")
    row.ignore("priority", "strict_priority", "policy_class")
    edges = [_dependency(edge) for edge in row.objects("dependencies")]
    request = TraceRequest(
        request=row.text("request_id"),
        branch=branch or session,
        parent_branch=row.optional_text("parent_branch_id"),
        kind=BranchKind(kind),
        version=row.optional_integer("context_version") or 0,
        model=row.text("model"),
        input_tokens=row.integer("input_length", 1),
        output_tokens=row.integer("output_length"),
        block_ids=row.ids("hash_ids"),
        not_before=_seconds(row.number("not_before_ms")),
        dependencies=tuple(edge for edge, _ in edges),
        recorded_seconds=None if recorded is None else _seconds(recorded),
        new_input=row.optional_text("new_input"),
    )
    row.finish()
    spawn = next((edge.request for edge, relation in edges if relation == "spawn"), None)
    return request, spawn


def _dependency(row: Fields) -> tuple[Dependency, str]:
    relation = row.choice("relation", RELATIONS)
    trigger = Trigger(row.choice("trigger", tuple(trigger.value for trigger in Trigger)))
    if trigger is Trigger.DISPATCH and relation != "spawn":
        raise row.wrong("trigger", "completion unless the relation is spawn", trigger.value)
    edge = Dependency(
        request=row.text("request_id"),
        trigger=trigger,
        delay=_seconds(row.optional_number("delay_ms") or 0.0),
    )
    row.finish()
    return edge, relation


def _row(name: str, request: TraceRequest, branches: dict[str, str]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "request_id": request.request,
        "play_id": name,
        "session_id": request.branch,
        "model": request.model or "unknown",
        "input_length": request.input_tokens,
        "output_length": request.output_tokens,
        "hash_ids": list(request.block_ids),
        "not_before_ms": _milliseconds(request.not_before),
        "dependencies": [_edge(request, edge, branches) for edge in request.dependencies],
        "branch_id": request.branch,
        "branch_kind": request.kind.value,
        "context_version": request.version,
    }
    if request.parent_branch is not None:
        row["parent_branch_id"] = request.parent_branch
    if request.recorded_seconds is not None:
        row["recorded_api_time_ms"] = _milliseconds(request.recorded_seconds)
    if request.new_input is not None:
        row["new_input"] = request.new_input
    return row


def _edge(request: TraceRequest, edge: Dependency, branches: dict[str, str]) -> dict[str, Any]:
    relation = "join"
    if branches[edge.request] == request.branch:
        relation = "sequence"
    elif branches[edge.request] == request.parent_branch:
        relation = "spawn"
    return {
        "request_id": edge.request,
        "trigger": edge.trigger.value,
        "relation": relation,
        "delay_ms": _milliseconds(edge.delay),
    }


def _seconds(milliseconds: float) -> float:
    return whole_microseconds(milliseconds / 1000.0)


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000.0, 3)
