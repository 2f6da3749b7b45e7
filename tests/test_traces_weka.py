"""Rules of the Weka importer, each on a trace small enough to read."""

import json

import pytest

from evolving_infra.errors import InputError
from evolving_infra.traces.weka import WekaOptions, read_weka
from evolving_infra.traces.workload import Trigger
from evolving_infra.types import BranchKind


def call(t: float, blocks: list[int], api: float | None = 1.0, **more) -> dict:
    row = {"t": t, "type": "n", "model": "m", "in": 64 * len(blocks) + 5, "out": 7}
    return row | {"hash_ids": blocks, "api_time": api} | more


def subagent(t: float, calls: list[dict], duration_ms: float | None = None, **more) -> dict:
    row = {"t": t, "type": "subagent", "agent_id": "sub", "subagent_type": "Explore"}
    return row | {"status": "completed", "duration_ms": duration_ms, "requests": calls} | more


def trace(*rows: dict, **more) -> dict:
    fields = {"id": "w", "models": ["m"], "block_size": 64, "hash_id_scope": "local"}
    return fields | {"requests": list(rows)} | more


def waits(workload) -> dict[str, list[tuple[str, str, float]]]:
    return {
        request.request: [
            (needed.request, needed.trigger.value, needed.delay) for needed in request.dependencies
        ]
        for request in workload.requests
    }


def test_think_time_runs_from_end_to_start():
    workload = read_weka("f", trace(call(0, [1]), call(9, [1, 2], think_time=7.5)))
    assert waits(workload) == {"main-0": [], "main-1": [("main-0", "completion", 7.5)]}
    assert workload.requests[0].not_before == 0.0


def test_the_gap_counts_where_think_time_is_absent():
    workload = read_weka("f", trace(call(0, [1], api=2.0), call(9, [1, 2])))
    assert waits(workload)["main-1"] == [("main-0", "completion", 7.0)]


def test_requests_may_be_out_of_order():
    workload = read_weka("f", trace(call(9, [1, 2]), call(0, [1])))
    assert [request.input_tokens for request in workload.requests] == [69, 133]


def completed_subagent() -> dict:
    return trace(
        call(0, [1], api=10.0, stop="tool_use"),
        subagent(31.0, [call(0, [8], api=2.0), call(15, [8, 9], api=5.0)], duration_ms=20500),
        call(40, [1, 2]),
    )


def test_a_completed_subagent_is_stamped_at_its_end_and_joins_the_next_request():
    workload = read_weka("f", completed_subagent())
    assert waits(workload) == {
        "main-0": [],
        "sub-0": [("main-0", "completion", 0.5)],
        "sub-1": [("sub-0", "completion", 13.0)],
        "main-1": [("main-0", "completion", 0.0), ("sub-1", "completion", 9.5)],
    }
    sub = workload.requests[1]
    assert (sub.branch, sub.kind, sub.parent_branch) == ("sub", BranchKind.SUBAGENT, "main")
    assert "sub-agents stamped at their end: 1" in workload.notes


def test_the_stamp_can_be_forced_to_be_the_start():
    workload = read_weka("f", completed_subagent(), WekaOptions(stamp="start"))
    assert waits(workload)["sub-0"] == [("main-0", "completion", 21.0)]
    assert waits(workload)["main-1"] == [("main-0", "completion", 30.0)]


def test_a_stamp_that_the_parent_contradicts_is_the_start():
    rows = completed_subagent()
    rows["requests"][0]["stop"] = "end_turn"
    assert "sub-agents stamped at their start: 1" in read_weka("f", rows).notes


def test_an_async_subagent_is_stamped_at_its_launch_and_joins_nothing():
    launched = subagent(10.5, [call(0, [8], api=2.0)], status="async_launched")
    rows = trace(call(0, [1], api=10.0, stop="tool_use"), launched, call(40, [1, 2]))
    assert waits(read_weka("f", rows)) == {
        "main-0": [],
        "sub-0": [("main-0", "completion", 0.5)],
        "main-1": [("main-0", "completion", 30.0)],
    }


def test_nested_times_may_be_absolute():
    rows = trace(call(0, [1], api=30.0), subagent(5.0, [call(5, [8]), call(9, [8, 9])], 8000))
    workload = read_weka("f", rows)
    assert "sub-agents with absolute times: 1" in workload.notes
    assert waits(workload)["sub-0"] == [("main-0", Trigger.DISPATCH.value, 5.0)]
    assert waits(workload)["sub-1"] == [("sub-0", "completion", 3.0)]
    relative = read_weka("f", rows, WekaOptions(nested="relative"))
    assert waits(relative)["sub-0"] == [("main-0", "dispatch", 10.0)]


def test_dropped_blocks_raise_the_version():
    old, edited, compacted = [1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 7]
    rows = trace(call(0, old), call(9, edited), call(19, [*edited, 8]), call(29, compacted))
    workload = read_weka("f", rows)
    assert [request.version for request in workload.requests] == [0, 1, 1, 2]
    assert {request.branch for request in workload.requests} == {"main"}
    assert set(workload.notes) == {
        "edits of the last blocks inferred: 1",
        "compactions inferred: 1",
    }


def test_a_context_that_is_used_again_makes_the_rewrite_a_fork():
    rows = trace(call(0, [1, 2, 3]), call(9, [1, 2, 9]), call(19, [1, 2, 3, 4]))
    workload = read_weka("f", rows)
    assert [request.branch for request in workload.requests] == ["main", "main.1", "main"]
    assert workload.requests[1].kind is BranchKind.FORK
    assert [request.version for request in workload.requests] == [0, 0, 0]


def test_overlapping_branches_that_share_a_prefix_are_forks_that_join():
    rows = trace(
        call(0, [1, 2, 3]),
        call(2, [1, 2, 50, 51], api=6.0),
        call(2.5, [1, 2, 60, 61], api=4.0),
        call(9, [1, 2, 3, 4, 5]),
        call(8.5, [1, 2, 50, 51, 52]),
        call(12, [1, 2, 3, 4, 5, 6]),
    )
    workload = read_weka("f", rows)
    branches = {request.request: request.branch for request in workload.requests}
    assert list(branches.values()) == ["main", "main.1", "main.2", "main.1", "main", "main"]
    parents = {request.branch: request.parent_branch for request in workload.requests}
    assert parents == {"main": None, "main.1": "main", "main.2": "main"}
    assert waits(workload)["main-4"][1:] == [("main-2", "completion", 2.5)]
    assert waits(workload)["main-5"][1:] == [("main-3", "completion", 2.5)]


def test_overlapping_branches_that_share_nothing_are_subagents_that_join():
    rows = trace(call(0, [1], api=5.0), call(0.1, [2], 5.0), call(0.2, [3], 5.0), call(6, [1, 4]))
    workload = read_weka("f", rows)
    kinds = {request.branch: request.kind.value for request in workload.requests}
    assert kinds == {"main": "root", "main.1": "subagent", "main.2": "subagent"}
    assert [name for name, _, _ in waits(workload)["main-3"]] == ["main-0", "main-1", "main-2"]


def test_another_model_is_a_branch_of_its_own():
    other = call(4, [1], model="small")
    workload = read_weka("f", trace(call(0, [1, 2]), other, call(9, [1, 2, 3])))
    assert [request.branch for request in workload.requests] == ["main", "main.1", "main"]


def test_ids_that_do_not_cover_the_input_are_counted():
    rows = trace(call(0, [1, 2], **{"in": 300}), call(3, [], **{"in": 10}))
    notes = read_weka("f", rows).notes
    assert "calls whose ids do not cover their complete blocks: 1" in notes


def without(row: dict, name: str) -> dict:
    return {key: value for key, value in row.items() if key != name}


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ([], "f: expected a JSON object, got []"),
        (trace(), "f.requests: expected at least one model call"),
        (trace(call(0, [1]), extra=1), "f: expected no unknown field, got 'extra'"),
        (trace(call(0, [1], color=1)), "f.requests[0]: expected no unknown field, got 'color'"),
        (trace(call(-1, [1])), "f.requests[0].t: expected a finite number >= 0, got -1"),
        (trace(call(float("nan"), [1])), "f.requests[0].t: expected a finite number >= 0, got nan"),
        (trace(call(0, [1], out="x")), "f.requests[0].out: expected an integer >= 0, got 'x'"),
        (trace(call(0, [1], out=True)), "f.requests[0].out: expected an integer >= 0, got True"),
        (trace(call(0, [1, 1])), "f.requests[0].hash_ids: expected ids that do not repeat"),
        (trace(call(0, [1, "2"])), "f.requests[0].hash_ids: expected a list of integers, got '2'"),
        (trace(without(call(0, [1]), "in")), "f.requests[0].in: expected an integer, got None"),
        (trace(call(0, [1], type="q")), "type: expected one of n, s, subagent, got 'q'"),
        (trace(call(0, [1])) | {"block_size": 0}, "f.block_size: expected an integer >= 1, got 0"),
        (trace(call(0, [1])) | {"hash_id_scope": "global"}, "hash_id_scope: expected one of local"),
        (trace(call(0, [1]), subagent(1, [])), "f.requests[1].requests: expected at least one"),
    ],
)
def test_mistakes_name_their_field(raw, text):
    with pytest.raises(InputError) as caught:
        read_weka("f", raw)
    assert text in str(caught.value)
    json.dumps(raw)


def test_options_are_checked():
    with pytest.raises(InputError, match="stamp: expected auto, start or end, got 'middle'"):
        WekaOptions(stamp="middle")
    with pytest.raises(InputError, match="nested"):
        WekaOptions(nested="middle")
