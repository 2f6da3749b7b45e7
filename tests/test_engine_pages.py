"""The page pool against a naive model, and the order of eviction."""

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from evolving_infra.engine.pages import PagePool
from evolving_infra.engine.request import BlocksAdded, BlocksEvicted
from tests.test_engine_rig import SMALL, Rig, prompt_of

PAGES = 6
KEYS = [bytes([i]) * 32 for i in range(9)]


class PoolMachine(RuleBasedStateMachine):
    """Naive: a page is a record; the evictable one with the smallest (counted, access) goes."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(PAGES)
        self.references = [0] * PAGES
        self.holds = [0] * PAGES
        self.keys: list[bytes | None] = [None] * PAGES
        self.access = [0] * PAGES
        self.counted: set[bytes] = set()
        self.clock = 0
        self.before: set[bytes] = set()

    def idle(self, page: int) -> bool:
        return not self.references[page] and not self.holds[page]

    def touch(self, page: int) -> None:
        self.clock += 1
        self.access[page] = self.clock

    def evictable(self) -> list[int]:
        pages = [p for p in range(PAGES) if self.idle(p) and self.keys[p] is not None]
        return sorted(pages, key=lambda p: (self.keys[p] in self.counted, self.access[p]))

    def free(self) -> list[int]:
        return [p for p in range(PAGES) if self.idle(p) and self.keys[p] is None]

    @rule(count=st.integers(1, 3))
    def allocate(self, count: int) -> None:
        if count > len(self.free()) + len(self.evictable()):
            return
        lost = self.evictable()[: max(0, count - len(self.free()))]
        for page in lost:
            self.keys[page] = None
        for page in self.pool.allocate(count):
            assert self.idle(page)
            assert self.keys[page] is None
            self.references[page] = 1

    @precondition(lambda self: any(self.references))
    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def publish(self, data: st.DataObject, key: bytes) -> None:
        fresh = [p for p in range(PAGES) if self.references[p] and self.keys[p] is None]
        if fresh:
            page = data.draw(st.sampled_from(fresh))
            assert self.pool.publish(page, key) == (key not in self.keys)
            if key not in self.keys:
                self.keys[page] = key

    @rule(key=st.sampled_from(KEYS))
    def take(self, key: bytes) -> None:
        pages = self.pool.match([key])
        assert pages == [p for p in range(PAGES) if self.keys[p] == key]
        self.pool.take(pages)
        for page in pages:
            self.references[page] += 1

    @precondition(lambda self: any(self.references))
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        used = [p for p in range(PAGES) if self.references[p]]
        pages = data.draw(st.lists(st.sampled_from(used), unique=True))
        self.pool.give_back(pages)
        for page in reversed(pages):
            self.references[page] -= 1
            self.touch(page)

    @precondition(lambda self: any(self.references))
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from([p for p in range(PAGES) if self.references[p]]))
        self.pool.hold([page])
        self.holds[page] += 1

    @precondition(lambda self: any(self.holds))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from([p for p in range(PAGES) if self.holds[p]]))
        self.pool.release([page])
        self.holds[page] -= 1
        self.touch(page)

    @rule(key=st.sampled_from(KEYS), counted=st.booleans())
    def set_counted(self, key: bytes, counted: bool) -> None:
        self.pool.set_counted([key], counted)
        (self.counted.add if counted else self.counted.discard)(key)
        if key in self.keys:
            self.touch(self.keys.index(key))

    @rule()
    def flush(self) -> None:
        lost = self.evictable()
        expected = [self.keys[page] for page in lost]
        self.drain()
        assert list(self.pool.flush()) == expected
        for page in lost:
            self.keys[page] = None
        self.before = {key for key in self.keys if key is not None}

    @rule()
    def drain(self) -> None:
        added, evicted = self.pool.drain()
        now = {key for key in self.keys if key is not None}
        assert set(added) == now - self.before
        assert set(evicted) == self.before - now
        self.before = now

    @invariant()
    def counts_agree(self) -> None:
        assert self.pool.free_pages == len(self.free())
        assert self.pool.room() == len(self.free()) + len(self.evictable())
        assert self.pool.held_pages == sum(map(bool, self.holds))
        assert set(self.pool.cached_keys) == {key for key in self.keys if key is not None}


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


def test_blocks_that_no_branch_needs_are_evicted_first() -> None:
    rig = Rig(replace(SMALL, device_pages=64))
    old, new = prompt_of(1, 481), prompt_of(2, 481)
    for name, prompt in (("old", old), ("new", new)):
        rig.submit(name, prompt, 1)
        rig.run()
    rig.engine.set_counted(rig.hasher.chain(old), counted=True)
    for i in range(3):
        rig.submit(f"x{i}", prompt_of(10 + i, 481), 1)
        rig.run()
    cached = set(rig.engine.cached_keys())
    assert cached >= set(rig.hasher.chain(old))
    assert not cached & set(rig.hasher.chain(new))


def test_the_end_of_a_context_is_evicted_before_its_start() -> None:
    pool = PagePool(4)
    pages = pool.allocate(4)
    for page, key in zip(pages, KEYS, strict=False):
        pool.publish(page, key)
    pool.give_back(pages)
    pool.allocate(2)
    assert pool.match(KEYS) == pages[:2]


def test_added_and_evicted_blocks_add_up_to_what_is_cached() -> None:
    rig = Rig(replace(SMALL, device_pages=64))
    for i in range(8):
        rig.submit(f"r{i}", prompt_of(i % 5, 400), 3)
        rig.run()
    cached: set[bytes] = set()
    for event in rig.events:
        if isinstance(event, BlocksAdded):
            assert not cached & set(event.keys)
            cached |= set(event.keys)
        elif isinstance(event, BlocksEvicted):
            assert cached >= set(event.keys)
            cached -= set(event.keys)
    assert cached == set(rig.engine.cached_keys())
    assert rig.of(BlocksEvicted)
    assert set(rig.engine.flush()) == cached
