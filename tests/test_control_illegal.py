"""Illegal events raise, say what is wrong, and change nothing."""

from collections import OrderedDict
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any

import numpy as np
import pytest

from evolving_infra.config import ControlConfig
from evolving_infra.control import events as ev
from evolving_infra.control.branches import BranchTree
from evolving_infra.control.plane import ControlPlane
from evolving_infra.errors import EvolvingInfraError, InputError, StateError
from evolving_infra.types import BranchKind, Phase, Role, Tier

PAGE = 16
KEYS = tuple(bytes([i]) for i in range(6))
NOW = 10.0
MEASURED: dict[str, Any] = {
    "node": "p",
    "seconds": 0.1,
    "uncached_tokens": 1,
    "pairs": 1,
    "restored_tokens": 0,
}
JOIN: dict[str, Any] = {
    "node": "new",
    "role": Role.BOTH,
    "page_size": PAGE,
    "l1_blocks": 9,
    "l2_blocks": 9,
}
DONE: dict[str, Any] = {"cached_tokens": 0, "restored_tokens": 0}


def picture(value: object) -> object:
    """Everything reachable, as plain comparable values."""
    if isinstance(value, dict):
        pairs = [(picture(k), picture(v)) for k, v in value.items()]
        return pairs if isinstance(value, OrderedDict) else sorted(pairs, key=repr)
    if isinstance(value, list | tuple):
        return [picture(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((picture(item) for item in value), key=repr)
    if isinstance(value, np.ndarray):
        return value.tolist()
    if is_dataclass(value):
        named = {field.name: getattr(value, field.name) for field in fields(value)}
        return [type(value).__name__, picture(named)]
    if type(value).__module__.startswith("evolving_infra") and not isinstance(value, Enum):
        return [type(value).__name__, picture(vars(value))]
    return repr(value)


def arrival(**changes: Any) -> ev.RequestArrived:
    first = ev.RequestArrived(
        request="new",
        branch="fresh",
        version=0,
        kind=BranchKind.ROOT,
        parent=None,
        prompt_keys=KEYS[:2],
        prompt_tokens=40,
        max_tokens=4,
    )
    return replace(first, **changes)


@pytest.fixture
def plane() -> ControlPlane:
    """p prefill, d decode, x lost; ``queued`` and ``decoding`` live; branches main, fork, ended."""
    plane = ControlPlane(ControlConfig())
    roles = {"p": Role.PREFILL, "d": Role.DECODE, "x": Role.DECODE}
    for node, role in roles.items():
        plane.handle(ev.NodeJoined(**{**JOIN, "node": node, "role": role}), 0.0)
    fork = {"kind": BranchKind.FORK, "parent": "main"}
    story: tuple[ev.Event, ...] = (
        ev.NodeLost(node="x"),
        arrival(request="over", branch="main", version=3),
        ev.RequestFinished(request="over", keys=KEYS[:3], output_tokens=9),
        arrival(request="queued", branch="main", version=3),
        arrival(request="decoding", branch="fork", **fork),
        ev.RequestStarted(request="decoding", node="p", phase=Phase.PREFILL),
        ev.PrefillDone(request="decoding", node="p", cached_tokens=0, restored_tokens=0),
        arrival(request="last", branch="ended"),
        ev.RequestFinished(request="last", keys=KEYS[:2], output_tokens=1),
        ev.BranchEnded(branch="ended"),
        ev.PrefillMeasured(node="p", seconds=0.1, uncached_tokens=9, pairs=45, restored_tokens=0),
    )
    for event in story:
        plane.handle(event, NOW)
    return plane


INPUT = [
    (arrival(branch="main", version=2), "version: expected at least 3, never going back, got 2"),
    (arrival(version=-1), "version: expected 0 or more, got -1"),
    (arrival(parent="main"), "parent: expected none for a root branch, got 'main'"),
    (arrival(kind=BranchKind.FORK), "parent: expected a known branch for a fork, got None"),
    (
        arrival(kind=BranchKind.SUBAGENT, parent="nobody"),
        "parent: expected a known branch for a subagent, got 'nobody'",
    ),
    (
        arrival(branch="fork", kind=BranchKind.SUBAGENT, parent="main"),
        "kind: expected fork, as the branch started, got 'subagent'",
    ),
    (
        arrival(branch="fork", kind=BranchKind.FORK, parent="fork"),
        "parent: expected 'main', as the branch started, got 'fork'",
    ),
    (arrival(prompt_tokens=0, prompt_keys=()), "prompt_tokens: expected 1 or more, got 0"),
    (arrival(max_tokens=0), "max_tokens: expected 1 or more, got 0"),
    (arrival(prompt_tokens=31), "prompt_keys: expected at most 1 complete blocks, got 2"),
    (ev.NodeJoined(**{**JOIN, "page_size": 32}), "page_size: expected 16, as p has, got 32"),
    (ev.NodeJoined(**{**JOIN, "l2_blocks": 0}), "l2_blocks: expected a positive number, got 0"),
    (ev.NodeLost(node="nobody"), "node: expected one of d, p, x, got 'nobody'"),
    (ev.RoleAsked(node="nobody", role=Role.BOTH), "node: expected one of d, p, x, got 'nobody'"),
    (ev.BranchEnded(branch="nobody"), "branch: expected a known branch, got 'nobody'"),
    (
        ev.PrefillMeasured(**{**MEASURED, "seconds": -1.0}),
        "seconds: expected a finite number, 0 or more, got -1.0",
    ),
    (ev.PrefillMeasured(**{**MEASURED, "node": "nobody"}), "node: expected one of"),
    (
        ev.DecodeMeasured(node="p", seconds=0.1, running=-1, context_tokens=0),
        "running: expected a finite number, 0 or more, got -1",
    ),
    (
        ev.FetchMeasured(node="p", seconds=0.1, blocks=-1),
        "blocks: expected a finite number, 0 or more, got -1",
    ),
    (
        ev.RequestFinished(request="queued", keys=KEYS[:2], output_tokens=-1),
        "output_tokens: expected a finite number, 0 or more, got -1",
    ),
    (
        ev.PrefillDone(request="queued", node="p", cached_tokens=-1, restored_tokens=0),
        "cached_tokens: expected a finite number, 0 or more, got -1",
    ),
    ("not an event", "event: expected one of control.events.Event, got 'not an event'"),
]
STATE = [
    (arrival(branch="ended"), "branch 'ended' has ended: it takes no more requests"),
    (arrival(request="queued"), "request 'queued' is live already"),
    (ev.BranchEnded(branch="ended"), "branch 'ended' has ended already"),
    (ev.NodeJoined(**{**JOIN, "node": "p"}), "node 'p' is up already"),
    (ev.NodeLost(node="x"), "node 'x' is down already"),
    (ev.BlocksStored(node="x", tier=Tier.L1, keys=KEYS), "node 'x' is not up"),
    (ev.BlocksRemoved(node="nobody", tier=Tier.L1, keys=KEYS), "node 'nobody' is not up"),
    (ev.RequestStarted(request="over", node="p", phase=Phase.PREFILL), "'over' is not live"),
    (
        ev.RequestStarted(request="queued", node="d", phase=Phase.PREFILL),
        "request 'queued' is in prefill on p, not in prefill on d",
    ),
    (
        ev.RequestBounced(request="queued", node="p", phase=Phase.DECODE),
        "request 'queued' is in prefill on p, not in decode on p",
    ),
    (
        ev.PrefillDone(request="decoding", node="p", **DONE),
        "request 'decoding' is in decode on d, not in prefill on p",
    ),
    (ev.RequestFinished(request="over", keys=(), output_tokens=0), "'over' is not live"),
    (ev.RequestAborted(request="over"), "'over' is not live"),
]


@pytest.mark.parametrize(
    ("event", "text", "kind"),
    [(*case, InputError) for case in INPUT] + [(*case, StateError) for case in STATE],
    ids=lambda value: type(value).__name__ if not isinstance(value, str | type) else "",
)
def test_illegal_events_change_nothing(plane: ControlPlane, event, text, kind) -> None:
    before = picture(plane)
    with pytest.raises(EvolvingInfraError) as raised:
        plane.handle(event, NOW + 5.0)
    assert type(raised.value) is kind
    assert text in str(raised.value)
    assert picture(plane) == before
    plane.handle(ev.TimerDue(), NOW)  # not even the time has moved
    plane.check()


def test_time_never_goes_back(plane: ControlPlane) -> None:
    before = picture(plane)
    for now in (NOW - 0.1, float("nan")):
        with pytest.raises(StateError, match="time goes back"):
            plane.handle(ev.TimerDue(), now)
    assert picture(plane) == before


def test_a_request_can_start_only_once(plane: ControlPlane) -> None:
    event = ev.RequestStarted(request="queued", node="p", phase=Phase.PREFILL)
    plane.handle(event, NOW)
    with pytest.raises(StateError, match="runs already"):
        plane.handle(event, NOW)


def test_the_picture_sees_what_an_event_changes(plane: ControlPlane) -> None:
    changes: tuple[ev.Event, ...] = (
        ev.BranchEnded(branch="main"),
        ev.BlocksStored(node="p", tier=Tier.L1, keys=KEYS[5:]),
        ev.PrefillMeasured(**MEASURED),
        ev.RequestStarted(request="queued", node="p", phase=Phase.PREFILL),
    )
    for event in changes:
        before = picture(plane)
        plane.handle(event, NOW)
        assert picture(plane) != before


def test_queries_change_nothing(plane: ControlPlane) -> None:
    before = picture(plane)
    plane.nodes()
    plane.next_timer()
    plane.check()
    plane.request("queued")
    assert plane.counted_at("nobody") == ()
    assert plane.keys_at("nobody") == frozenset()
    assert plane.homes("nobody") == {}
    assert picture(plane) == before


def test_ended_branches_are_remembered_up_to_a_bound() -> None:
    tree = BranchTree(remembered_ends=2)
    for name in ("a", "b", "c"):
        tree.arrive(arrival(branch=name, request=name), 0.0)
        tree.end(name)
    for name in ("b", "c"):
        with pytest.raises(StateError, match="has ended already"):
            tree.check_end(name)
    with pytest.raises(InputError, match="expected a known branch, got 'a'"):
        tree.check_end("a")
