"""Whole files: totals and ideal reuse of real traces, round trips, detection, broken files."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evolving_infra.errors import InputError
from evolving_infra.traces.agentic_mooncake import read_agentic_mooncake, write_agentic_mooncake
from evolving_infra.traces.load import load
from evolving_infra.traces.stats import reused_tokens, trace_stats
from evolving_infra.traces.workload import (
    Dependency,
    TraceRequest,
    Trigger,
    Workload,
    in_dependency_order,
)
from evolving_infra.types import BranchKind

EXAMPLES = Path(__file__).parent.parent / "examples"
ORIGINALS = Path(__file__).parent.parent.parent / "shared" / "traces"

needs_originals = pytest.mark.skipif(
    not ORIGINALS.exists(), reason="the original traces are not beside the checkout"
)

KNOWN = {
    "trace_0026": (3, 52_760, 5_294, 0.6174),
    "trace_0291": (32, 2_254_119, 19_504, 0.8973),
    "trace_0279": (90, 8_140_469, 45_386, 0.9472),
    "trace_0010": (172, 15_068_078, 101_388, 0.9419),
    "trace_0254": (162, 16_049_708, 76_126, 0.9393),
}
"""Requests, input and output tokens, and one-worker reuse, as an independent simulator has them."""


def totals(workload: Workload) -> tuple[int, int, int, float]:
    stats = trace_stats(workload)
    hit = round(stats.ideal_hit, 4)
    return (stats.requests, stats.input_tokens, stats.output_tokens, hit)


@pytest.mark.parametrize("name", ["trace_0026", "trace_0279", "trace_0291"])
def test_examples_have_the_known_totals(name):
    assert totals(load(EXAMPLES / f"{name}.jsonl")) == KNOWN[name]


@needs_originals
@pytest.mark.parametrize("name", sorted(KNOWN))
def test_originals_have_the_known_totals(name):
    assert totals(load(ORIGINALS / "weka" / f"{name}.json")) == KNOWN[name]


@needs_originals
@pytest.mark.parametrize("name", ["trace_0026", "trace_0279", "trace_0291"])
def test_examples_are_the_originals(name):
    assert load(EXAMPLES / f"{name}.jsonl") == load(ORIGINALS / "weka" / f"{name}.json")


@needs_originals
def test_mooncake_conversation_reuses_37_percent():
    stats = trace_stats(load(ORIGINALS / "mooncake" / "conversation_trace.jsonl"))
    assert (stats.requests, stats.input_tokens, stats.output_tokens) == (
        12_031,
        144_793_823,
        4_122_048,
    )
    assert round(stats.ideal_hit, 3) == 0.374


@needs_originals
@pytest.mark.parametrize("name", ["simple", "one_subagent", "multi_model", "terminal_subagent"])
def test_fixtures_survive_a_round_trip(name):
    workload = load(ORIGINALS / "weka_fixtures" / f"{name}.json")
    assert read_agentic_mooncake("f", write_agentic_mooncake(workload)) == workload


def test_reuse_is_at_most_the_input_and_stops_at_the_first_unknown_block():
    rows = [
        TraceRequest(request="a", branch="a", input_tokens=20, output_tokens=1, block_ids=(1, 2)),
        TraceRequest(request="b", branch="b", input_tokens=20, output_tokens=1, block_ids=(1, 2)),
        TraceRequest(
            request="c", branch="c", input_tokens=60, output_tokens=1, block_ids=(1, 9, 2)
        ),
    ]
    workload = Workload(name="w", block_size=16, requests=tuple(rows))
    assert reused_tokens(workload) == {"a": 0, "b": 20, "c": 16}


def test_branches_of_an_example():
    stats = trace_stats(load(EXAMPLES / "trace_0279.jsonl"))
    assert (stats.branches, stats.subagents, stats.forks) == (3, 2, 0)
    assert (stats.compactions, stats.edits) == (1, 9)
    assert stats.longest_input == 138_155
    assert stats.waits == 87
    assert stats.wait_p50 == pytest.approx(9.0)
    assert dict(stats.waits_over) == {10: 36, 60: 9, 300: 3}


def test_a_fan_out_is_joined_by_the_parent():
    workload = load(EXAMPLES / "trace_0291.jsonl")
    starts = workload.recorded_starts()
    first = {request.branch: starts[request.request] for request in reversed(workload.requests)}
    assert abs(first["agent_001"] - first["agent_002"]) < 2.0
    joined = [request for request in workload.requests if len(request.dependencies) == 3]
    assert len(joined) == 1
    assert joined[0].branch == "main"


def test_mooncake_rows_are_roots_with_arrivals():
    workload = load(EXAMPLES / "mooncake_head100.jsonl")
    assert len(workload.requests) == len(workload.ends()) == 100
    assert {request.kind for request in workload.requests} == {BranchKind.ROOT}
    assert workload.requests[-1].not_before > 0


times = st.integers(0, 10**9).map(lambda microseconds: microseconds / 1_000_000)


@st.composite
def workloads(draw) -> Workload:
    requests: list[TraceRequest] = []
    branches = [(BranchKind.ROOT, None)]
    for index in range(draw(st.integers(1, 8))):
        branch = draw(st.integers(0, len(branches)))
        if branch == len(branches) or index == 0:
            parent = f"b{draw(st.integers(0, branch - 1))}" if index else None
            kind = draw(st.sampled_from([BranchKind.FORK, BranchKind.SUBAGENT]))
            branches += [(kind, parent)] if index else []
            branch = branch if index else 0
        kind, parent = branches[branch]
        needed = draw(st.sets(st.sampled_from(range(index)), max_size=3)) if index else set()
        requests.append(
            TraceRequest(
                request=f"r{index}",
                branch=f"b{branch}",
                kind=kind,
                parent_branch=parent,
                version=draw(st.integers(0, 3)),
                model=draw(st.sampled_from(["m", "n"])),
                input_tokens=draw(st.integers(1, 10**6)),
                output_tokens=draw(st.integers(0, 10**4)),
                block_ids=tuple(draw(st.lists(st.integers(0, 99), unique=True, max_size=5))),
                not_before=draw(times),
                dependencies=tuple(
                    Dependency(request=f"r{other}", delay=draw(times)) for other in sorted(needed)
                ),
                recorded_seconds=draw(st.none() | times),
                new_input=draw(st.none() | st.just("tool_result")),
            )
        )
    first_of_branch = {request.branch: request for request in reversed(requests)}
    kept = [
        request
        for request in requests
        if request.parent_branch is None or request.parent_branch in first_of_branch
    ]
    notes = tuple(draw(st.lists(st.text(min_size=1), max_size=2)))
    return Workload(
        name="w", block_size=draw(st.integers(1, 512)), requests=tuple(kept), notes=notes
    )


@given(workloads())
def test_a_workload_comes_back_exactly_as_written(workload):
    assert read_agentic_mooncake("f", write_agentic_mooncake(workload)) == workload


def header(**more) -> dict:
    fields = {"schema": "dynamo.agentic_mooncake", "version": 2, "block_size": 64}
    return fields | {"hash_id_scope": "local", "source": {"format": "x", "digest": ""}} | more


def row(name: str, session: str, blocks: list[int], *edges: tuple[str, str, str], **more) -> dict:
    dependencies = [
        {"request_id": other, "trigger": trigger, "relation": relation, "delay_ms": 250}
        for other, trigger, relation in edges
    ]
    fields = {"request_id": name, "play_id": "p", "session_id": session, "model": "m"}
    fields |= {"input_length": 64 * len(blocks), "output_length": 3, "hash_ids": blocks}
    return fields | {"not_before_ms": 0, "dependencies": dependencies} | more


def text(*rows: dict) -> str:
    return "\n".join(json.dumps(line) for line in rows)


def test_branches_are_inferred_from_sessions():
    rows = [
        row("c", "sub", [9], ("a", "dispatch", "spawn")),
        row("a", "main", [1, 2, 3, 4]),
        row("f", "fork", [1, 2, 3, 4, 5], ("a", "completion", "spawn")),
        row("b", "main", [1, 2, 3, 7], ("a", "completion", "sequence"), priority=3),
        row("d", "main", [1], ("b", "completion", "sequence"), ("c", "completion", "join")),
    ]
    workload = read_agentic_mooncake("f", text(header(), *rows))
    found = {
        request.request: (request.branch, request.kind.value, request.parent_branch)
        for request in workload.requests
    }
    assert found == {
        "a": ("main", "root", None),
        "f": ("fork", "fork", "main"),
        "b": ("main", "root", None),
        "c": ("sub", "subagent", "main"),
        "d": ("main", "root", None),
    }
    by_name = {request.request: request for request in workload.requests}
    assert [by_name[name].version for name in "abd"] == [0, 1, 2]
    needed = Dependency(request="a", trigger=Trigger.DISPATCH, delay=0.25)
    assert by_name["c"].dependencies == (needed,)
    assert "compactions inferred: 1" in workload.notes


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "f.json: expected a Weka, Mooncake or agentic_mooncake trace, got 'an empty file'"),
        ("{", "f.json, line 1, column 2: expected complete JSON"),
        ('{"id": "x", "requests": [{"t": 1', "got 'the end of the file'"),
        ('{"id": "x", "requests": [{"t": "a', "got 'the end of the file'"),
        ("hello", "f.json, line 1, column 1: expected complete JSON of a Weka"),
        ('{"prompt": "hi"}', "f.json: expected a Weka, Mooncake or agentic_mooncake trace, got"),
        ("[1]", "f.json: expected a Weka, Mooncake or agentic_mooncake trace, got [1]"),
        ('{"timestamp": 0, "hash_ids": [], "input_length": 1}\n', "line 1.output_length: expected"),
        (text(header(), row("a", "s", [1])) + '\n{"request', "f.json, line 3, column 2: expected"),
        (text(header(version=1), row("a", "s", [1])), "line 1.version: expected 2, got 1"),
        (text(header(), {}), "f.json, line 2.play_id: expected a string, got None"),
        (text(header()), "f.json: expected at least one request, got 'only a header'"),
        (text(header(), row("a", "s", [1], x=1)), "line 2: expected no unknown field, got 'x'"),
        (
            text(header(), row("a", "s", [1]), row("b", "s", [1], ("a", "dispatch", "sequence"))),
            "line 3.dependencies[0].trigger: expected completion unless the relation is spawn",
        ),
        (
            text(header(), row("a", "s", [1], ("a", "completion", "sequence"))),
            "f.json, dependencies: expected no cycle, got 'a'",
        ),
        ("[" * 100_000, "f.json: expected a Weka, Mooncake or agentic_mooncake trace, got 'JSON"),
        ('{"a": ' * 100_000, "got 'JSON that is nested too deeply'"),
        (text(header()) + "\n" + "[" * 100_000, "got 'JSON that is nested too deeply'"),
        ('{"id": "x", "requests": [' + "1" * 5000 + "]}", "trace, got 'an integer of thousands"),
        (text(header()) + "\n" + "1" * 5000, "line 2: expected a JSON object, got 'an integer of"),
        (text(header(), row("a", "s", [1], input_length=10**400)), "an integer of at most 2**53"),
        (text(header(), row("a", "s", [1], not_before_ms=10**400)), "a number of at most 2**53"),
    ],
)
def test_broken_files_are_refused_in_one_sentence(tmp_path, content, sentence):
    path = tmp_path / "f.json"
    path.write_text(content)
    with pytest.raises(InputError) as caught:
        load(path)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_or_not_text(tmp_path):
    with pytest.raises(InputError, match="No such file"):
        load(tmp_path / "absent.json")
    for content in (b"\xff\xfe{}", bytes(range(256)) * 9):
        (tmp_path / "f.json").write_bytes(content)
        with pytest.raises(InputError, match="UTF-8 text"):
            load(tmp_path / "f.json")
    with pytest.raises(InputError, match="Is a directory"):
        load(tmp_path)
    (tmp_path / "f.json").write_bytes(bytes(99))
    with pytest.raises(InputError, match=r"f\.json, line 1, column 1"):
        load(tmp_path / "f.json")


@needs_originals
def test_a_real_trace_cut_in_the_middle_is_refused(tmp_path):
    whole = (ORIGINALS / "weka" / "trace_0026.json").read_text()
    path = tmp_path / "cut.json"
    path.write_text(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"cut\.json, line 1, column \d+"):
        load(path)


def test_a_request_id_used_twice_is_refused() -> None:
    row = TraceRequest(request="a", branch="b", input_tokens=4, output_tokens=1)
    with pytest.raises(InputError, match="a request id used once"):
        in_dependency_order("x", [row, row])
