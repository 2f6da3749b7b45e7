"""Weka / kv-cache-tester traces: one JSON file holds one recorded agent session.

What the format leaves open is decided here: a completed sub-agent's ``t`` is its *end*, the times
inside it are relative to its start, waits run from end to start, and a parent's next call joins the
sub-agents that have ended. Calls recorded flat are sorted into branches (``chains.py``).
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from evolving_infra.errors import wrong
from evolving_infra.traces.chains import SLACK_SECONDS, Call
from evolving_infra.traces.family import Stream, build
from evolving_infra.traces.fields import Fields
from evolving_infra.traces.workload import Workload, count_notes

SPAWN_STOP = "tool_use"


@dataclass(frozen=True, kw_only=True)
class WekaOptions:
    """How to read times the format leaves open. ``auto`` decides by file and notes the choice."""

    stamp: str = "auto"
    """What a completed sub-agent's ``t`` is: ``start`` or ``end``."""
    nested: str = "auto"
    """What the times inside a sub-agent are: ``relative`` to its start, or ``absolute``."""

    def __post_init__(self) -> None:
        if self.stamp not in ("auto", "start", "end"):
            raise wrong("stamp", "auto, start or end", self.stamp)
        if self.nested not in ("auto", "relative", "absolute"):
            raise wrong("nested", "auto, relative or absolute", self.nested)


def read_weka(where: str, raw: object, options: WekaOptions | None = None) -> Workload:
    """The workload of one parsed file. ``where`` names the file in errors.

    Raises:
        InputError: A field is missing, unknown or of the wrong kind.
    """
    options = options or WekaOptions()
    trace = Fields(where, raw)
    name, block_size = trace.text("id"), trace.integer("block_size", 1)
    trace.choice("hash_id_scope", ("local",))
    trace.ignore("models", "tool_tokens", "system_tokens", "totals")
    counts: Counter[str] = Counter()
    rows = trace.objects("requests")
    trace.finish()
    calls = [_call(row, 0.0, block_size, counts) for row in rows if not _is_subagent(row)]
    if not calls:
        raise wrong(f"{where}.requests", "at least one model call", "none")
    calls.sort(key=lambda call: call.start)
    streams = [Stream(name="main", calls=tuple(calls))]
    for row in rows:
        if _is_subagent(row):
            streams.append(_subagent(row, calls, block_size, options, counts))
    requests = build(where, tuple(streams), counts)
    return Workload(name=name, block_size=block_size, requests=requests, notes=count_notes(counts))


def _is_subagent(row: Fields) -> bool:
    return row.choice("type", ("n", "s", "subagent")) == "subagent"


def _call(row: Fields, origin: float, block_size: int, counts: Counter[str]) -> Call:
    """One model call. ``origin`` is added to its ``t``."""
    row.choice("type", ("n", "s"))
    row.ignore("output_types", "ttft")
    ids, tokens = row.ids("hash_ids"), row.integer("in", 1)
    if len(ids) != tokens // block_size:
        counts["calls whose ids do not cover their complete blocks"] += 1
    seconds, think = row.optional_number("api_time"), row.optional_number("think_time")
    if seconds is None:
        counts["calls without a recorded duration, taken as 0 s"] += 1
    kinds: list[Any] = row.items("input_types") if row.has("input_types") else []
    row.ignore("input_types")
    call = Call(
        start=origin + row.number("t"),
        seconds=seconds,
        think=think,
        model=row.text("model"),
        input_tokens=tokens,
        output_tokens=row.integer("out"),
        block_ids=ids,
        context=ids[: tokens // block_size],
        stopped_for_tool=row.any("stop") == SPAWN_STOP,
        new_input=str(kinds[-1]) if kinds else None,
    )
    row.finish()
    return call


def _subagent(
    row: Fields,
    parents: list[Call],
    block_size: int,
    options: WekaOptions,
    counts: Counter[str],
) -> Stream:
    """The calls of one sub-agent, with absolute times."""
    name, stamp = row.text("agent_id"), row.number("t")
    launched = row.choice("status", ("completed", "async_launched")) == "async_launched"
    milliseconds = row.optional_number("duration_ms")
    ignored = ("type", "subagent_type", "total_tokens", "tool_use_count", "models")
    row.ignore(*ignored, "tool_tokens", "system_tokens")
    rows = row.objects("requests")
    row.finish()
    if not rows:
        raise row.wrong("requests", "at least one model call", "none")
    start = stamp
    if milliseconds is not None and not launched:
        start = _start(stamp, milliseconds / 1000.0, parents, options.stamp, counts)
    first = min(nested.number("t") for nested in rows)
    relative = options.nested == "relative" or (options.nested == "auto" and first < stamp)
    counts["sub-agents with absolute times"] += not relative
    calls = [_call(nested, start if relative else 0.0, block_size, counts) for nested in rows]
    calls.sort(key=lambda call: call.start)
    return Stream(name=name, calls=tuple(calls), subagent=True, joins=not launched)


def _start(
    stamp: float, duration: float, parents: list[Call], choice: str, counts: Counter[str]
) -> float:
    """Start of a completed sub-agent: its stamp is taken as the end if that explains the parent.

    It does when, ``duration`` before the stamp, the parent had stopped for a tool and then sent
    nothing until the stamp.
    """
    begin = stamp - duration
    before = [call for call in parents if call.end <= begin + SLACK_SECONDS]
    spawner = max(before, key=lambda call: call.start, default=None)
    quiet = spawner is not None and not any(
        spawner.start < call.start < stamp - SLACK_SECONDS for call in parents
    )
    explains = spawner is not None and spawner.stopped_for_tool and quiet
    is_end = choice == "end" or (choice == "auto" and explains)
    counts[
        "sub-agents stamped at their end" if is_end else "sub-agents stamped at their start"
    ] += 1
    return max(0.0, begin) if is_end else stamp
