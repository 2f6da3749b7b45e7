"""The workload type: order, branch ends, recorded starts."""

from fractions import Fraction

import pytest

from evolving_infra.errors import InputError
from evolving_infra.traces.workload import (
    BranchEnd,
    Dependency,
    TraceRequest,
    Trigger,
    Workload,
    in_dependency_order,
)
from evolving_infra.types import BranchKind


def request(name: str, branch: str = "main", after: tuple[str, ...] = (), **more) -> TraceRequest:
    fields = {"input_tokens": 128, "output_tokens": 4, "block_ids": (1, 2)} | more
    dependencies = tuple(Dependency(request=other, delay=1.0) for other in after)
    return TraceRequest(request=name, branch=branch, dependencies=dependencies, **fields)


def child(name: str, branch: str, after: tuple[str, ...] = (), **more) -> TraceRequest:
    kind = more.pop("kind", BranchKind.SUBAGENT)
    parent = more.pop("parent", "main")
    return request(name, branch, after, kind=kind, parent_branch=parent, **more)


def workload(*requests: TraceRequest, block_size: int | Fraction = 64) -> Workload:
    return Workload(name="w", block_size=block_size, requests=requests)


def test_a_root_ends_with_its_family_and_a_subagent_after_its_last_request():
    made = workload(
        request("a"),
        child("s", "sub", ("a",)),
        request("b", after=("a",)),
        child("t", "sub", ("s",)),
        child("g", "grandchild", ("t",), parent="sub"),
        child("h", "grandchild", ("g",), parent="sub"),
        request("x", "other"),
    )
    assert made.ends() == (
        BranchEnd(branch="main", after=("a", "s", "b", "t", "g", "h")),
        BranchEnd(branch="sub", after=("s", "t", "g")),
        BranchEnd(branch="grandchild", after=("g", "h")),
        BranchEnd(branch="other", after=("x",)),
    )


def test_recorded_starts_follow_completions_dispatches_and_arrivals():
    launch = Dependency(request="a", trigger=Trigger.DISPATCH, delay=0.5)
    made = workload(
        request("a", not_before=2.0, recorded_seconds=10.0),
        TraceRequest(
            request="s",
            branch="sub",
            kind=BranchKind.SUBAGENT,
            parent_branch="main",
            input_tokens=1,
            output_tokens=1,
            dependencies=(launch,),
        ),
        request("b", after=("a", "s")),
    )
    assert made.recorded_starts() == {"a": 2.0, "s": 2.5, "b": 13.0}


def test_complete_blocks_exclude_a_partial_tail_and_ids_past_the_input():
    made = workload(request("a", input_tokens=127, block_ids=(1, 2)))
    assert made.blocks_in(made.requests[0]) == 1
    halved = workload(request("a", input_tokens=127, block_ids=(1, 2)), block_size=Fraction(63, 2))
    assert halved.blocks_in(halved.requests[0]) == 2


@pytest.mark.parametrize(
    ("requests", "text"),
    [
        ((request("a"), request("a")), "w, a: expected a request id used once"),
        ((request("a", after=("b",)), request("b")), "w, a, dependencies: expected an earlier"),
        ((request("a", input_tokens=0),), "input tokens: expected at least 1, got 0"),
        ((child("s", "sub"),), "parent branch: expected an earlier branch, got 'main'"),
        ((request("a", kind=BranchKind.FORK),), "expected one unless it is a root, got None"),
        (
            (request("a"), child("s", "sub"), child("t", "sub", kind=BranchKind.FORK)),
            "w, t, kind and parent: expected those of its branch, got 'fork'",
        ),
    ],
)
def test_contradictions_are_refused(requests, text):
    with pytest.raises(InputError) as caught:
        workload(*requests)
    assert text in str(caught.value)


def test_rows_are_sorted_only_as_far_as_dependencies_ask():
    rows = (request("c", after=("a",)), request("a"), request("b"))
    assert [row.request for row in in_dependency_order("f", rows)] == ["a", "b", "c"]
    with pytest.raises(InputError, match="no cycle"):
        in_dependency_order("f", (request("a", after=("b",)), request("b", after=("a",))))
    with pytest.raises(InputError, match="a known request, got 'z'"):
        in_dependency_order("f", (request("a", after=("z",)),))
