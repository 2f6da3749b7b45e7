"""Bringing a branch's blocks to its prefill home while its tools run."""

from collections.abc import Sequence

import pytest

from evolving_infra.config import ControlConfig
from evolving_infra.control import commands as do
from evolving_infra.control import events as ev
from evolving_infra.control.plane import ControlPlane
from evolving_infra.control.prefetch import PrefetchWants
from evolving_infra.types import BranchKind, Phase, Role, Tier

PAGE = 16
KEYS = tuple(bytes([i]) for i in range(8))


def cluster(*, prefetch: bool = True, **roles: Role) -> ControlPlane:
    plane = ControlPlane(ControlConfig(prefetch=prefetch))
    for node, role in roles.items():
        plane.handle(
            ev.NodeJoined(node=node, role=role, page_size=PAGE, l1_blocks=99, l2_blocks=99), 0.0
        )
    return plane


def store(plane: ControlPlane, node: str, keys: Sequence[bytes], tier=Tier.L2) -> list[do.Prefetch]:
    return prefetches(plane, ev.BlocksStored(node=node, tier=tier, keys=tuple(keys)))


def prefetches(plane: ControlPlane, event: ev.Event) -> list[do.Prefetch]:
    commands = plane.handle(event, 0.0)
    plane.check()
    return [command for command in commands if isinstance(command, do.Prefetch)]


def decoding(plane: ControlPlane, name: str, branch: str = "b", kind=BranchKind.ROOT, parent=None):
    """A request of four prompt blocks that is being decoded, its prompt written through."""
    plane.handle(
        ev.RequestArrived(
            request=name,
            branch=branch,
            version=0,
            kind=kind,
            parent=parent,
            prompt_keys=KEYS[:4],
            prompt_tokens=4 * PAGE,
            max_tokens=64,
        ),
        0.0,
    )
    view = plane.request(name)
    assert view is not None
    node = view.node
    assert node is not None
    assert store(plane, node, KEYS[:4]) == []
    done = ev.PrefillDone(request=name, node=node, cached_tokens=0, restored_tokens=0)
    assert prefetches(plane, done) == []


def finish(plane: ControlPlane, name: str, blocks: int = 6) -> list[do.Prefetch]:
    return prefetches(plane, ev.RequestFinished(request=name, keys=KEYS[:blocks], output_tokens=33))


def copy(*keys: int, branch: str = "b", node: str = "p", source: str = "d") -> do.Prefetch:
    wanted = tuple(KEYS[i] for i in keys)
    return do.Prefetch(node=node, source=source, branch=branch, keys=wanted)


@pytest.fixture
def pd() -> ControlPlane:
    return cluster(p=Role.PREFILL, d=Role.DECODE)


def test_what_the_prefill_home_lacks_is_copied_at_the_end_of_a_request(pd) -> None:
    decoding(pd, "r")
    store(pd, "d", KEYS[2:6])
    assert finish(pd, "r") == [copy(4, 5)]


def test_blocks_stored_late_are_copied_when_they_come(pd) -> None:
    decoding(pd, "r")
    store(pd, "d", KEYS[4:5])
    assert finish(pd, "r") == [copy(4)]
    assert store(pd, "d", KEYS[5:6]) == [copy(5)]
    assert store(pd, "d", KEYS[5:6]) == [], "a block is copied once"
    assert store(pd, "d", KEYS[6:7]) == [], "nobody waits for this one"


def test_late_blocks_at_home_or_on_the_device_need_no_copy(pd) -> None:
    decoding(pd, "r")
    finish(pd, "r")
    assert store(pd, "p", KEYS[4:5]) == []
    assert store(pd, "p", KEYS[5:6], Tier.L1) == []
    assert store(pd, "d", KEYS[4:6]) == []


def test_the_next_request_and_the_end_of_the_branch_cancel_the_wish(pd) -> None:
    decoding(pd, "r1")
    finish(pd, "r1")
    decoding(pd, "r2")
    assert store(pd, "d", KEYS[4:6]) == []
    finish(pd, "r2", blocks=8)
    pd.handle(ev.BranchEnded(branch="b"), 0.0)
    assert store(pd, "d", KEYS[6:8]) == []


def test_no_copy_for_a_branch_that_ended_or_has_another_request(pd) -> None:
    decoding(pd, "r1")
    decoding(pd, "r2")
    store(pd, "d", KEYS[4:6])
    assert finish(pd, "r2") == []
    pd.handle(ev.BranchEnded(branch="b"), 0.0)
    assert finish(pd, "r1") == []


def test_two_branches_that_want_a_block_at_one_node_get_one_copy(pd) -> None:
    decoding(pd, "r1")
    decoding(pd, "r2", "fork", BranchKind.FORK, "b")
    finish(pd, "r1")
    finish(pd, "r2")
    assert store(pd, "d", KEYS[4:6]) == [copy(4, 5)]


def test_prefetch_can_be_turned_off() -> None:
    plane = cluster(prefetch=False, p=Role.PREFILL, d=Role.DECODE)
    decoding(plane, "r")
    store(plane, "d", KEYS[4:5])
    assert finish(plane, "r") == []
    assert store(plane, "d", KEYS[5:6]) == []


def test_no_copy_to_a_home_that_is_down_or_prefills_no_more() -> None:
    for event in (ev.NodeLost(node="p"), ev.RoleAsked(node="p", role=Role.DECODE)):
        plane = cluster(p=Role.PREFILL, q=Role.PREFILL, d=Role.DECODE)
        decoding(plane, "r")
        plane.handle(event, 0.0)
        store(plane, "d", KEYS[4:5])
        assert finish(plane, "r") == []
        assert store(plane, "d", KEYS[5:6]) == []


def test_a_decode_node_that_becomes_prefill_hands_its_blocks_home_first(pd) -> None:
    decoding(pd, "r")
    store(pd, "d", KEYS[4:6])
    assert finish(pd, "r") == [copy(4, 5)]
    assert prefetches(pd, ev.RoleAsked(node="d", role=Role.PREFILL)) == [copy(4, 5)]


def test_the_decode_home_is_the_preferred_source() -> None:
    plane = cluster(p=Role.PREFILL, c=Role.DECODE, d=Role.DECODE)
    decoding(plane, "r1", "other")
    decoding(plane, "r2")
    assert plane.homes("b")[Phase.DECODE] == "d"
    store(plane, "c", KEYS[4:7])
    store(plane, "d", KEYS[4:5])
    assert finish(plane, "r2", blocks=7) == [copy(5, 6, source="c"), copy(4, source="d")]


def test_wishes_are_bounded() -> None:
    wants = PrefetchWants(max_wanted=3)
    wants.add("a", KEYS[:2])
    wants.add("b", KEYS[1:6])
    assert len(wants) == 3
    wants.check({"a", "b"})
    assert wants.take(KEYS[1]) == ("a", "b")
    assert wants.take(KEYS[1]) == ()
    wants.drop("a")
    wants.drop("a")
    assert len(wants) == 0
    wants.check(set())


def test_a_prefill_node_that_holds_most_of_the_context_is_kept_up_to_date() -> None:
    plane = cluster(p=Role.PREFILL, q=Role.PREFILL, d=Role.DECODE)
    decoding(plane, "r")
    assert plane.homes("b")[Phase.PREFILL] == "p"
    store(plane, "q", KEYS[:3])
    store(plane, "d", KEYS[4:5])
    at_end = finish(plane, "r")
    assert at_end == [copy(4), copy(4, node="q"), copy(3, node="q", source="p")]
    assert store(plane, "d", KEYS[5:6]) == [copy(5), copy(5, node="q")]


def test_a_prefill_node_that_holds_little_of_the_context_is_left_alone() -> None:
    plane = cluster(p=Role.PREFILL, q=Role.PREFILL, d=Role.DECODE)
    decoding(plane, "r")
    store(plane, "q", KEYS[:2])
    store(plane, "d", KEYS[4:5])
    assert finish(plane, "r") == [copy(4)]
    assert store(plane, "d", KEYS[5:6]) == [copy(5)]
