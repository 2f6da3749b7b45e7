"""The store against a naive model that keeps lists and recounts."""

from collections.abc import Iterator

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from evolving_infra.kv.node_store import NodeStore
from evolving_infra.kv.slots import BlockRef
from tests.test_ops_samples import key_of

KEYS = [key_of(i) for i in range(9)]
BLOCKS, SHARDS, LEASE_S = 4, 2, 10.0
OWNERS = st.sampled_from(["one", "two"])
SOME_KEYS = st.lists(st.sampled_from(KEYS), min_size=1, max_size=4)


class SortedOrder:
    """(counted, last access), sorted anew each time."""

    def __init__(self) -> None:
        self.used: dict[bytes, tuple[float, int]] = {}
        self.counted: set[bytes] = set()
        self.calls = 0

    def add(self, key: bytes, now: float) -> None:
        assert key not in self.used
        self.touch_any(key, now)

    def touch(self, key: bytes, now: float) -> None:
        assert key in self.used
        self.touch_any(key, now)

    def touch_any(self, key: bytes, now: float) -> None:
        self.calls += 1
        self.used[key] = (now, self.calls)

    def remove(self, key: bytes) -> None:
        del self.used[key]

    def set_counted(self, key: bytes, counted: bool) -> None:
        (self.counted.add if counted else self.counted.discard)(key)

    def victims(self) -> Iterator[bytes]:
        return iter(sorted(self.used, key=lambda key: (key in self.counted, self.used[key])))


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.order = SortedOrder()
        self.store = NodeStore(blocks=BLOCKS, shards=SHARDS, lease_s=LEASE_S, order=self.order)
        self.now = 0.0
        self.reserved: dict[bytes, str] = {}
        self.committed: list[bytes] = []
        self.refs: dict[bytes, BlockRef] = {}
        self.resting: list[BlockRef] = []
        self.leases: dict[int, tuple[str, list[bytes], float]] = {}
        self.known_to_directory: set[bytes] = set()

    def leased(self) -> set[bytes]:
        return {k for _, keys, ends in self.leases.values() if ends > self.now for k in keys}

    @rule(keys=SOME_KEYS, owner=OWNERS)
    def reserve(self, keys: list[bytes], owner: str) -> None:
        wanted = [k for k in dict.fromkeys(keys) if k not in {*self.reserved, *self.committed}]
        expected_order = SortedOrder()
        expected_order.used, expected_order.counted = dict(self.order.used), self.order.counted
        expected_order.calls = self.order.calls
        for key in keys:
            if key in self.committed:
                expected_order.touch(key, self.now)
        free = BLOCKS - len(self.reserved) - len(self.committed) - len(self.resting)
        victims = [k for k in expected_order.victims() if k not in self.leased()]
        victims = victims[: max(0, len(wanted) - free)]
        got = self.store.reserve(keys, owner, self.now)
        granted = {ref.key: ref for ref in got if ref is not None}
        assert list(granted) == wanted[: free + len(victims)]
        for victim in victims:
            self.committed.remove(victim)
        self.reserved.update(dict.fromkeys(granted, owner))
        self.refs.update(granted)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), end=st.sampled_from(["commit", "abandon", "quarantine"]))
    def finish(self, data: st.DataObject, end: str) -> None:
        key = data.draw(st.sampled_from(sorted(self.reserved)))
        owner = self.reserved.pop(key)
        if end == "commit":
            self.store.commit([key], owner, self.now)
            self.committed.append(key)
        elif end == "abandon":
            self.store.abandon([key], owner)
        else:
            self.resting += self.store.quarantine([key], owner)

    @precondition(lambda self: self.resting)
    @rule()
    def drain(self) -> None:
        self.store.drained(self.resting)
        self.resting = []

    @rule(keys=SOME_KEYS, owner=OWNERS)
    def lease(self, keys: list[bytes], owner: str) -> None:
        number, refs = self.store.lease(keys, owner, self.now)
        assert refs == [self.refs[k] if k in self.committed else None for k in keys]
        assert number not in self.leases
        here = [k for k in dict.fromkeys(keys) if k in self.committed]
        self.leases[number] = (owner, here, self.now + LEASE_S)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.leases)))
        self.store.release(number, self.leases.pop(number)[0])

    @rule(owner=OWNERS)
    def lose(self, owner: str) -> None:
        self.store.drop_owner(owner)
        self.reserved = {k: o for k, o in self.reserved.items() if o != owner}
        self.leases = {n: lease for n, lease in self.leases.items() if lease[0] != owner}

    @rule(keys=SOME_KEYS, counted=st.booleans())
    def count(self, keys: list[bytes], counted: bool) -> None:
        self.store.set_counted(keys, counted)

    @rule(keys=SOME_KEYS)
    def touch(self, keys: list[bytes]) -> None:
        self.store.touch(keys, self.now)

    @rule(seconds=st.sampled_from([0.5, 4.0, LEASE_S]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def tell(self) -> None:
        stored, removed = self.store.drain_changes()
        self.known_to_directory |= set(stored)
        self.known_to_directory -= set(removed)
        assert self.known_to_directory == set(self.committed)

    @invariant()
    def agrees(self) -> None:
        self.store.check()
        assert self.store.lookup(KEYS) == [key in self.committed for key in KEYS]
        generations = [self.refs[k].generations for k in {*self.reserved, *self.committed}]
        slots = [slot for k in {*self.reserved, *self.committed} for slot in self.refs[k].slots]
        slots += [slot for ref in self.resting for slot in ref.slots]
        assert len(slots) == len(set(slots)), "no slot is used twice"
        assert all(generation > 0 for pair in generations for generation in pair)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
