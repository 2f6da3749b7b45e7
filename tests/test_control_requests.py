"""The life of a request through the plane: placement, failover, role changes, bounces, aborts."""

import pytest

from evolving_infra.config import ControlConfig
from evolving_infra.control import commands as do
from evolving_infra.control import events as ev
from evolving_infra.control.plane import ControlPlane
from evolving_infra.errors import StateError
from evolving_infra.types import BranchKind, Phase, Role, Tier

PAGE = 16
KEYS = tuple(bytes([i]) for i in range(10))


def join(plane: ControlPlane, node: str, role: Role, now: float = 0.0) -> list[do.Command]:
    return plane.handle(
        ev.NodeJoined(node=node, role=role, page_size=PAGE, l1_blocks=100, l2_blocks=100), now
    )


def cluster(**roles: Role) -> ControlPlane:
    plane = ControlPlane(ControlConfig())
    for node, role in roles.items():
        join(plane, node, role)
    return plane


def arrive(plane: ControlPlane, name: str, branch: str = "b", blocks: int = 4) -> list[do.Command]:
    return orders(
        plane.handle(
            ev.RequestArrived(
                request=name,
                branch=branch,
                version=0,
                kind=BranchKind.ROOT,
                parent=None,
                prompt_keys=KEYS[:blocks],
                prompt_tokens=blocks * PAGE + 1,
                max_tokens=8,
            ),
            0.0,
        )
    )


def tell(plane: ControlPlane, event: ev.Event, now: float = 0.0) -> list[do.Command]:
    commands = orders(plane.handle(event, now))
    plane.check()
    return commands


def node_of(plane: ControlPlane, name: str) -> str | None:
    view = plane.request(name)
    assert view is not None
    return view.node


def orders(commands: list[do.Command]) -> list[do.Command]:
    """Without the changes of counts, which other tests look at."""
    return [command for command in commands if not isinstance(command, do.SetCounted)]


def done(name: str, node: str) -> ev.PrefillDone:
    return ev.PrefillDone(request=name, node=node, cached_tokens=0, restored_tokens=0)


def start_prefill(name: str, node: str, *fetches: do.FetchSource) -> do.StartPrefill:
    return do.StartPrefill(request=name, node=node, fetches=fetches, predicted_seconds=0.0)


def test_a_request_from_arrival_to_its_end() -> None:
    plane = cluster(d=Role.DECODE, p=Role.PREFILL)
    plane.handle(ev.BlocksStored(node="d", tier=Tier.L2, keys=KEYS[:3]), 0.0)
    assert arrive(plane, "r") == [
        start_prefill("r", "p", do.FetchSource(node="d", first=0, count=3))
    ]
    view = plane.nodes()[1]
    assert (view.name, view.queued, view.prefilling) == ("p", 1, 0)
    assert tell(plane, ev.RequestStarted(request="r", node="p", phase=Phase.PREFILL)) == []
    view = plane.nodes()[1]
    assert (view.queued, view.prefilling) == (0, 1)
    assert tell(plane, done("r", "p")) == [do.StartDecode(request="r", node="d", source="p")]
    assert tell(plane, ev.RequestStarted(request="r", node="d", phase=Phase.DECODE)) == []
    view = plane.nodes()[0]
    assert (view.decoding, view.queued, view.l2_held_blocks) == (1, 0, 3)
    tell(plane, ev.RequestFinished(request="r", keys=KEYS[:5], output_tokens=16))
    assert plane.request("r") is None
    assert plane.homes("b") == {Phase.PREFILL: "p", Phase.DECODE: "d"}


def test_ttft_is_predicted_once_something_was_measured() -> None:
    plane = cluster(p=Role.PREFILL)
    assert arrive(plane, "r1") == [start_prefill("r1", "p")]
    sample = ev.PrefillMeasured(
        node="p", seconds=0.1, uncached_tokens=100, pairs=5050, restored_tokens=0
    )
    plane.handle(sample, 0.0)
    (command,) = arrive(plane, "r2", branch="c")
    assert isinstance(command, do.StartPrefill)
    assert command.predicted_seconds > 0.0
    plane.handle(ev.DecodeMeasured(node="p", seconds=0.01, running=2, context_tokens=9), 0.0)


def test_without_a_prefill_node_a_decode_node_prefills_and_goes_on() -> None:
    plane = cluster(d=Role.DECODE)
    assert arrive(plane, "r") == [start_prefill("r", "d")]
    assert tell(plane, done("r", "d")) == [do.StartDecode(request="r", node="d", source="d")]


def test_without_a_decode_node_the_prefill_node_goes_on() -> None:
    plane = cluster(p=Role.PREFILL, q=Role.PREFILL)
    arrive(plane, "r")
    assert tell(plane, done("r", "p")) == [do.StartDecode(request="r", node="p", source="p")]
    assert plane.homes("b") == {Phase.PREFILL: "p"}, "a node that does not serve DECODE is no home"


def test_a_both_node_goes_on_unless_another_is_better() -> None:
    plane = cluster(a=Role.BOTH, b=Role.BOTH)
    arrive(plane, "r1")
    assert tell(plane, done("r1", "a")) == [do.StartDecode(request="r1", node="a", source="a")]
    assert arrive(plane, "r2", branch="c") == [start_prefill("r2", "a")]
    assert tell(plane, done("r2", "a")) == [do.StartDecode(request="r2", node="b", source="a")]


def test_no_node_is_up() -> None:
    plane = ControlPlane(ControlConfig())
    with pytest.raises(StateError, match="no node is up"):
        arrive(plane, "r")
    join(plane, "p", Role.PREFILL)
    tell(plane, ev.NodeLost(node="p"))
    with pytest.raises(StateError, match="no node is up"):
        arrive(plane, "r")
    assert plane.branch_count() == 0


def test_one_output_token_needs_no_decode() -> None:
    plane = cluster(p=Role.PREFILL, d=Role.DECODE)
    arrive(plane, "r")
    tell(plane, ev.RequestFinished(request="r", keys=KEYS[:4], output_tokens=1))
    assert plane.homes("b") == {Phase.PREFILL: "p"}


# -- failover --------------------------------------------------------------------------------


def test_requests_of_a_lost_node_start_anew_elsewhere_in_order() -> None:
    plane = cluster(p=Role.PREFILL, q=Role.PREFILL, d=Role.DECODE, e=Role.DECODE)
    arrive(plane, "r1")
    tell(plane, done("r1", "p"))
    arrive(plane, "r2", branch="c")
    assert tell(plane, ev.NodeLost(node="d")) == [start_prefill("r1", "q")]
    assert tell(plane, ev.NodeLost(node="p")) == [start_prefill("r2", "q")]
    assert tell(plane, done("r1", "q")) == [do.StartDecode(request="r1", node="e", source="q")]


def test_a_lost_engine_loses_its_device_blocks_and_keeps_its_host_blocks() -> None:
    plane = cluster(p=Role.PREFILL, q=Role.PREFILL)
    for tier, keys in ((Tier.L1, KEYS[:4]), (Tier.L2, KEYS[:2])):
        plane.handle(ev.BlocksStored(node="p", tier=tier, keys=keys), 0.0)
    tell(plane, ev.NodeLost(node="p"))
    view = plane.nodes()[0]
    assert (view.is_up, view.l1_held_blocks, view.l2_held_blocks) == (False, 0, 2)
    fetch = do.FetchSource(node="p", first=0, count=2)
    assert arrive(plane, "r") == [start_prefill("r", "q", fetch)]
    tell(plane, ev.StoreLost(node="p"))
    assert plane.keys_at("p") == frozenset()
    assert arrive(plane, "r2", branch="c") == [start_prefill("r2", "q")]


def test_without_another_node_requests_wait_for_the_next_to_join() -> None:
    plane = cluster(p=Role.PREFILL)
    arrive(plane, "r1")
    arrive(plane, "r2", branch="c")
    assert tell(plane, ev.NodeLost(node="p")) == []
    view = plane.request("r1")
    assert view is not None
    assert view.node is None
    commands = orders(join(plane, "q", Role.DECODE))
    assert commands == [start_prefill("r1", "q"), start_prefill("r2", "q")]
    plane.check()


def test_a_node_that_comes_back_keeps_its_role_and_what_counts_there() -> None:
    plane = cluster(p=Role.PREFILL, d=Role.DECODE)
    arrive(plane, "r")
    tell(plane, done("r", "p"))
    tell(plane, ev.RequestFinished(request="r", keys=KEYS[:5], output_tokens=16))
    tell(plane, ev.RoleAsked(node="p", role=Role.BOTH))
    tell(plane, ev.NodeLost(node="p"))
    assert join(plane, "p", Role.PREFILL) == [], "who reconnects is told all counts by the driver"
    assert plane.role("p") is Role.BOTH
    assert plane.counted_at("p") == KEYS[:5]


def test_store_blocks_may_come_before_the_engine() -> None:
    plane = cluster(p=Role.PREFILL)
    tell(plane, ev.BlocksStored(node="late", tier=Tier.L2, keys=KEYS[:2]))
    assert plane.known_role("late") is None
    fetch = do.FetchSource(node="late", first=0, count=2)
    assert arrive(plane, "r") == [start_prefill("r", "p", fetch)]


# -- roles, bounces, aborts ------------------------------------------------------------------


def test_a_role_change_withdraws_what_is_queued_and_leaves_what_runs() -> None:
    plane = cluster(p=Role.PREFILL, q=Role.PREFILL, d=Role.DECODE)
    arrive(plane, "r1")
    tell(plane, ev.RequestStarted(request="r1", node="p", phase=Phase.PREFILL))
    tell(plane, ev.BlocksStored(node="p", tier=Tier.L1, keys=KEYS))
    assert arrive(plane, "r2", branch="c") == [start_prefill("r2", "q")]
    for name in ("r3", "r4"):
        arrive(plane, name, branch=name)
    queued = [name for name in ("r2", "r3", "r4") if node_of(plane, name) == "p"]
    assert tell(plane, ev.RoleAsked(node="p", role=Role.DECODE)) == [
        do.RoleChanged(node="p", before=Role.PREFILL, after=Role.DECODE),
        *[do.Withdraw(request=name, node="p", phase=Phase.PREFILL) for name in queued],
    ]
    assert queued
    bounced = ev.RequestBounced(request=queued[0], node="p", phase=Phase.PREFILL)
    (again,) = tell(plane, bounced)
    assert isinstance(again, do.StartPrefill)
    assert again.node == "q"
    assert tell(plane, ev.RoleAsked(node="p", role=Role.DECODE)) == []
    running = plane.request("r1")
    assert running is not None
    assert (running.node, running.running) == ("p", True)


def test_even_the_last_prefill_node_may_change() -> None:
    plane = cluster(p=Role.PREFILL, d=Role.DECODE)
    arrive(plane, "r")
    changed = do.RoleChanged(node="p", before=Role.PREFILL, after=Role.DECODE)
    withdraw = do.Withdraw(request="r", node="p", phase=Phase.PREFILL)
    assert tell(plane, ev.RoleAsked(node="p", role=Role.DECODE)) == [changed, withdraw]
    bounced = ev.RequestBounced(request="r", node="p", phase=Phase.PREFILL)
    assert tell(plane, bounced) == [start_prefill("r", "d")]


def test_a_queued_decode_that_bounces_goes_on_from_the_same_source() -> None:
    plane = cluster(p=Role.PREFILL, d=Role.DECODE, e=Role.DECODE)
    arrive(plane, "r")
    tell(plane, done("r", "p"))
    changed = do.RoleChanged(node="d", before=Role.DECODE, after=Role.PREFILL)
    withdraw = do.Withdraw(request="r", node="d", phase=Phase.DECODE)
    assert tell(plane, ev.RoleAsked(node="d", role=Role.PREFILL)) == [changed, withdraw]
    bounced = ev.RequestBounced(request="r", node="d", phase=Phase.DECODE)
    assert tell(plane, bounced) == [do.StartDecode(request="r", node="e", source="p")]
    assert plane.homes("b")[Phase.DECODE] == "e"


def test_a_decode_that_bounces_from_its_source_leaves_it_also_without_a_decode_node() -> None:
    plane = cluster(p=Role.PREFILL, q=Role.PREFILL)
    arrive(plane, "r")
    done = ev.PrefillDone(request="r", node="p", cached_tokens=0, restored_tokens=0)
    assert tell(plane, done) == [do.StartDecode(request="r", node="p", source="p")]
    bounced = ev.RequestBounced(request="r", node="p", phase=Phase.DECODE)
    assert tell(plane, bounced) == [do.StartDecode(request="r", node="q", source="p")]


def test_a_decode_that_bounces_after_its_source_died_is_prefilled_again() -> None:
    plane = cluster(p=Role.PREFILL, q=Role.PREFILL, d=Role.DECODE)
    arrive(plane, "r")
    tell(plane, done("r", "p"))
    assert tell(plane, ev.NodeLost(node="p")) == []
    bounced = ev.RequestBounced(request="r", node="d", phase=Phase.DECODE)
    assert tell(plane, bounced) == [start_prefill("r", "q")]


def test_a_bounce_with_no_other_node_tries_the_same_and_not_for_ever() -> None:
    plane = cluster(p=Role.PREFILL)
    arrive(plane, "r")
    bounced = ev.RequestBounced(request="r", node="p", phase=Phase.PREFILL)
    for _ in range(16):
        assert tell(plane, bounced) == [start_prefill("r", "p")]
    with pytest.raises(StateError, match="refused 16 times"):
        tell(plane, bounced)


def test_an_abort_cancels_where_the_request_holds_something() -> None:
    plane = cluster(p=Role.PREFILL, d=Role.DECODE)
    arrive(plane, "r1")
    assert tell(plane, ev.RequestAborted(request="r1")) == [do.Cancel(request="r1", node="p")]
    arrive(plane, "r2")
    tell(plane, done("r2", "p"))
    assert tell(plane, ev.RequestAborted(request="r2")) == [
        do.Cancel(request="r2", node="d"),
        do.Cancel(request="r2", node="p"),
    ]
    arrive(plane, "r3")
    tell(plane, done("r3", "p"))
    tell(plane, ev.RequestStarted(request="r3", node="d", phase=Phase.DECODE))
    assert tell(plane, ev.RequestAborted(request="r3")) == [do.Cancel(request="r3", node="d")]
    assert plane.branch_count() == 1
    tell(plane, ev.NodeLost(node="d"))
    arrive(plane, "r4")
    tell(plane, ev.NodeLost(node="p"))
    assert tell(plane, ev.RequestAborted(request="r4")) == []
