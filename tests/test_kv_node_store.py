"""The index of a host pool: eviction, leases, deduplication, quarantine."""

import pytest

from evolving_infra.control.eviction import eviction_order
from evolving_infra.errors import StateError
from evolving_infra.kv.node_store import NodeStore
from evolving_infra.kv.slots import BlockRef
from evolving_infra.types import BlockKey
from tests.test_ops_samples import key_of

A, B, C, D, E = (key_of(i) for i in range(5))


def new_store(blocks: int = 3, shards: int = 1) -> NodeStore:
    return NodeStore(blocks=blocks, shards=shards, lease_s=10.0, order=eviction_order("counted"))


def write(store: NodeStore, *keys: BlockKey, now: float = 0.0) -> list[BlockRef]:
    refs = store.reserve(keys, "engine", now)
    store.commit(keys, "engine", now)
    store.check()
    return [ref for ref in refs if ref is not None]


def present(store: NodeStore, *keys: BlockKey) -> list[bool]:
    return store.lookup(keys)


def test_a_block_is_present_once_committed() -> None:
    store = new_store()
    (ref,) = store.reserve([A], "engine", 0.0)
    assert ref is not None
    assert ref.key == A
    assert present(store, A) == [False]
    store.commit([A], "engine", 0.0)
    assert present(store, A, B) == [True, False]
    assert store.lease([A, B], "reader", 0.0)[1] == [ref, None]


def test_a_block_has_one_slot_per_shard() -> None:
    store = new_store(blocks=2, shards=3)
    refs = write(store, A, B)
    assert sorted(slot for ref in refs for slot in ref.slots) == list(range(6))


def test_a_block_is_written_once() -> None:
    store = new_store()
    first = store.reserve([A, B, A], "engine", 0.0)
    assert [ref is None for ref in first] == [False, False, True]
    assert store.reserve([A], "other", 0.0) == [None]
    store.commit([A], "engine", 0.0)
    assert store.reserve([A], "other", 0.0) == [None]
    assert store.stats().deduplicated == 3
    store.check()


def test_the_least_recently_used_block_goes() -> None:
    store = new_store()
    write(store, A, B, C)
    store.touch([A], 1.0)
    write(store, D, now=2.0)
    assert present(store, A, B, C, D) == [True, False, True, True]
    assert store.stats().evicted == 1


@pytest.mark.parametrize("use", ["lease", "reserve"])
def test_reading_or_writing_again_is_a_use(use: str) -> None:
    store = new_store()
    write(store, A, B, C)
    if use == "lease":
        lease, _ = store.lease([A], "reader", 1.0)
        store.release(lease, "reader")
    else:
        store.reserve([A], "engine", 1.0)
    write(store, D, now=2.0)
    assert present(store, A, B) == [True, False]


def test_counted_blocks_go_last() -> None:
    store = new_store()
    store.set_counted([A], True)
    write(store, A, B, C)
    store.set_counted([B], True)
    store.set_counted([B], False)
    write(store, D, now=1.0)
    write(store, E, now=2.0)
    assert present(store, A, B, C, D, E) == [True, False, False, True, True]
    assert store.stats().counted == 1


def test_if_everything_is_counted_the_oldest_goes() -> None:
    store = new_store()
    write(store, A, B, C)
    store.set_counted([A, B, C], True)
    write(store, D, now=1.0)
    assert present(store, A, B, C, D) == [False, True, True, True]


def test_leased_blocks_stay_until_released() -> None:
    store = new_store()
    write(store, A, B, C)
    lease, _ = store.lease([A, B], "reader", 1.0)
    write(store, D, now=2.0)
    assert present(store, A, B, C, D) == [True, True, False, True]
    store.release(lease, "somebody else")
    write(store, E, now=3.0)
    assert present(store, A, B, D) == [True, True, False]
    store.release(lease, "reader")
    write(store, C, now=4.0)
    assert present(store, A) == [False]


def test_leases_time_out() -> None:
    store = new_store(blocks=1)
    write(store, A)
    store.lease([A], "reader", 5.0)
    assert store.reserve([B], "engine", 14.9) == [None]
    assert store.reserve([B], "engine", 15.0) != [None]
    assert present(store, A) == [False]


def test_two_leases_of_a_block_are_two() -> None:
    store = new_store(blocks=1)
    write(store, A)
    first, _ = store.lease([A], "reader", 1.0)
    store.lease([A], "reader", 1.0)
    store.release(first, "reader")
    store.release(first, "reader")
    assert store.reserve([B], "engine", 2.0) == [None]


def test_what_has_no_room_is_counted_as_dropped() -> None:
    store = new_store()
    write(store, A, B)
    store.lease([A, B], "reader", 0.0)
    refs = store.reserve([C, D, E], "engine", 1.0)
    assert [ref is None for ref in refs] == [False, True, True]
    assert store.stats().write_dropped == 2
    store.check()


def test_reserved_blocks_are_not_evicted() -> None:
    store = new_store(blocks=2)
    store.reserve([A, B], "engine", 0.0)
    assert store.reserve([C], "engine", 1.0) == [None]
    store.commit([A, B], "engine", 1.0)


def test_a_reused_slot_has_a_new_generation() -> None:
    store = new_store(blocks=1)
    (first,) = write(store, A)
    (second,) = write(store, B, now=1.0)
    (abandoned,) = store.reserve([C], "engine", 2.0)
    assert abandoned is not None
    store.abandon([C], "engine")
    (last,) = write(store, D, now=3.0)
    assert first.slots == second.slots == last.slots
    generations = [r.generations[0] for r in (first, second, abandoned, last)]
    assert generations == [1, 2, 3, 4]


def test_a_lost_connection_frees_what_it_held() -> None:
    store = new_store(blocks=2)
    write(store, A)
    store.lease([A], "lost", 0.0)
    store.reserve([B], "lost", 0.0)
    store.drop_owner("lost")
    store.check()
    assert [ref is None for ref in store.reserve([C, D], "engine", 1.0)] == [False, False]


def test_quarantined_slots_rest_until_drained() -> None:
    store = new_store(blocks=1)
    store.reserve([A], "fetch", 0.0)
    refs = store.quarantine([A], "fetch")
    assert store.reserve([B], "engine", 1.0) == [None]
    assert store.stats().quarantined == 1
    store.check()
    store.drained(refs)
    assert store.reserve([B], "engine", 2.0) != [None]


@pytest.mark.parametrize("op", ["commit", "abandon", "quarantine"])
@pytest.mark.parametrize("owner", ["engine", "thief"])
def test_only_the_reserver_may_finish(op: str, owner: str) -> None:
    store = new_store()
    store.reserve([A], "engine", 0.0)
    keys = [A, B] if owner == "engine" else [A]
    arguments = (keys, owner, 0.0) if op == "commit" else (keys, owner)
    with pytest.raises(StateError, match=f"is not reserved by {owner}"):
        getattr(store, op)(*arguments)
    store.commit([A], "engine", 0.0)
    assert present(store, A, B) == [True, False], "the refused call changed nothing"


def test_changes_are_told_once() -> None:
    store = new_store(blocks=2)
    write(store, A, B)
    assert store.drain_changes() == ((A, B), ())
    write(store, C, now=1.0)
    assert store.drain_changes() == ((C,), (A,))
    assert store.drain_changes() == ((), ())
    assert set(store.keys()) == {B, C}


def test_of_a_block_that_came_and_went_the_last_is_told() -> None:
    store = new_store(blocks=1)
    write(store, A)
    write(store, B, now=1.0)
    write(store, A, now=2.0)
    stored, removed = store.drain_changes()
    assert (stored, removed) == ((A,), (B,))
