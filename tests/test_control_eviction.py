"""The eviction orders against a plain sort."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evolving_infra.control.eviction import EvictionOrder, LruOrder, eviction_order
from evolving_infra.errors import InputError, StateError

KEYS = [bytes([i]) for i in range(6)]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "touch", "remove", "count", "uncount", "evict"]),
        st.sampled_from(KEYS),
        st.integers(0, 2),
    ),
    max_size=120,
)


def apply(order, model: dict, counted: set, step, clock: list) -> None:
    name, key, passed = step
    clock[0] += passed
    clock[1] += 1
    now = float(clock[0])
    if name in ("count", "uncount"):
        order.set_counted(key, name == "count")
        (counted.add if name == "count" else counted.discard)(key)
    elif name == "evict":
        victim = next(order.victims(), None)
        if victim is not None:
            order.remove(victim)
            del model[victim]
    elif (name == "add") == (key in model):
        with pytest.raises(StateError):
            order.add(key, now) if name == "add" else getattr(order, name)(
                *((key, now) if name == "touch" else (key,))
            )
    elif name == "remove":
        order.remove(key)
        del model[key]
    else:
        getattr(order, name)(key, now)
        model[key] = (now, clock[1])


@settings(deadline=None)
@given(STEPS)
def test_counted_order_is_a_sort_by_count_and_last_access(steps) -> None:
    order: EvictionOrder[bytes] = EvictionOrder()
    model: dict = {}
    counted: set = set()
    clock = [0, 0]
    for step in steps:
        apply(order, model, counted, step, clock)
        expected = sorted(model, key=lambda key: (key in counted, model[key]))
        assert list(order.victims()) == expected
        assert list(order.victims()) == expected, "looking at victims changes nothing"
        assert len(order) == len(model)


@settings(deadline=None)
@given(STEPS)
def test_lru_order_ignores_counts(steps) -> None:
    order: LruOrder[bytes] = LruOrder()
    model: dict = {}
    clock = [0, 0]
    for step in steps:
        apply(order, model, set(), step, clock)
        assert list(order.victims()) == sorted(model, key=model.__getitem__)


def test_a_count_set_before_the_block_is_there_holds_when_it_comes() -> None:
    order = eviction_order("counted")
    order.set_counted(b"needed", True)
    order.add(b"needed", 0.0)
    order.add(b"idle", 1.0)
    assert list(order.victims()) == [b"idle", b"needed"]
    order.remove(b"needed")
    order.add(b"needed", 2.0)
    assert list(order.victims()) == [b"idle", b"needed"]


def test_victims_may_be_removed_while_iterating() -> None:
    order = eviction_order("counted")
    for i in range(10):
        order.add(bytes([i]), float(i))
    leased = {bytes([0]), bytes([3])}
    gone = []
    for key in order.victims():
        if key not in leased:
            order.remove(key)
            gone.append(key[0])
    assert gone == [1, 2, 4, 5, 6, 7, 8, 9]
    assert list(order.victims()) == sorted(leased)


@pytest.mark.parametrize("seed", range(5))
def test_many_blocks_that_change_class_keep_their_last_access(seed) -> None:
    random = Random(seed)
    order: EvictionOrder[int] = EvictionOrder()
    accessed = {key: random.randrange(50) for key in range(300)}
    for key in sorted(accessed, key=accessed.__getitem__):
        order.add(key, float(accessed[key]))
    counted = set(random.sample(range(300), 150))
    for key in random.sample(range(300), 300):
        order.set_counted(key, True)
    for key in random.sample(range(300), 300):
        order.set_counted(key, key in counted)
    expected = sorted(accessed, key=lambda key: (key in counted, accessed[key], key))
    assert list(order.victims()) == expected


def test_stale_entries_stay_bounded() -> None:
    order: EvictionOrder[bytes] = EvictionOrder()
    for key in KEYS:
        order.add(key, 0.0)
    for i in range(10_000):
        order.touch(KEYS[i % len(KEYS)], float(i))
        order.set_counted(KEYS[i % 3], i % 2 == 0)
    assert sum(len(heap) for heap in order._heaps) < 400
    assert len(list(order.victims())) == len(KEYS)


def test_orders_by_name() -> None:
    assert isinstance(eviction_order("lru"), LruOrder)
    with pytest.raises(InputError, match="eviction: expected one of counted, lru, got 'fifo'"):
        eviction_order("fifo")
