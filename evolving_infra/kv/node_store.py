"""Index of one node's host pool: which block is in which slots. No I/O, no clock.

    free -> reserved -> committed -> free
               |-> (given up while a copy may still write) quarantined -> free

A block has one slot per shard; it is reserved, committed and evicted as a whole, so it is present
only with all its shards. ``owner`` names a connection: what it reserved or leased ends with it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from evolving_infra.errors import StateError
from evolving_infra.kv.eviction_order import BlockOrder
from evolving_infra.kv.leases import Leases
from evolving_infra.kv.slots import BlockRef, SlotPool
from evolving_infra.types import BlockKey


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """Counts of blocks: now (first six), and since the start.

    Only writes of the node's engine are ``written``, ``deduplicated`` (asked for, but here or being
    written already) or ``write_dropped`` (no room, or too many waiting); fetches are not.
    """

    capacity: int
    committed: int
    counted: int
    reserved: int
    leased: int
    quarantined: int
    written: int
    deduplicated: int
    evicted: int
    write_dropped: int


@dataclass(frozen=True, slots=True)
class _Reservation:
    ref: BlockRef
    owner: str
    is_write: bool


class NodeStore:
    """Blocks of one node's L2. All calls are O(keys) plus O(1) per eviction, unless stated."""

    def __init__(
        self,
        *,
        blocks: int,
        shards: int,
        lease_s: float,
        order: BlockOrder,
        first_generation: int = 1,
    ) -> None:
        self._capacity = blocks
        self._shards = shards
        self._order = order
        self._slots = SlotPool(blocks * shards, first_generation)
        self._reserved: dict[BlockKey, _Reservation] = {}
        self._committed: dict[BlockKey, BlockRef] = {}
        self._quarantined: dict[tuple[int, ...], BlockRef] = {}
        self._leases = Leases(lease_s)
        self._counted: set[BlockKey] = set()
        self._changes: dict[BlockKey, bool] = {}
        self._written = self._deduplicated = self._evicted = self._write_dropped = 0

    def reserve(
        self, keys: Sequence[BlockKey], owner: str, now: float, *, is_write: bool = True
    ) -> list[BlockRef | None]:
        """Slots to write each block to; None if it is here or being written, or nothing can go.

        Blocks that are here count as used. The others evict what the order gives up first; leased
        blocks stay. ``is_write``: the blocks count as the engine's writes, see ``StoreStats``.
        """
        self._leases.expire(now)
        wanted = [key for key in dict.fromkeys(keys) if not self._is_known(key)]
        self.touch([key for key in keys if key in self._committed], now)
        self._deduplicated += is_write * (len(keys) - len(wanted))
        self._make_room(len(wanted))
        refs: dict[BlockKey, BlockRef] = {}
        for key in wanted:
            if len(self._slots) < self._shards:
                self._write_dropped += is_write
                continue
            refs[key] = self._slots.take(key, self._shards)
            self._reserved[key] = _Reservation(refs[key], owner, is_write)
        return [refs.pop(key, None) for key in keys]

    def commit(self, keys: Iterable[BlockKey], owner: str, now: float) -> None:
        """The blocks are written. ``StateError`` if one is not reserved by ``owner``."""
        for key in self._require_reserved(keys, owner):
            entry = self._reserved.pop(key)
            self._committed[key] = entry.ref
            self._order.add(key, now)
            self._changes[key] = True
            self._written += entry.is_write

    def abandon(self, keys: Iterable[BlockKey], owner: str) -> None:
        """The blocks won't be written and nothing writes to their slots any more.

        ``StateError`` if one is not reserved by ``owner``.
        """
        for key in self._require_reserved(keys, owner):
            self._slots.give_back(self._reserved.pop(key).ref)

    def quarantine(self, keys: Iterable[BlockKey], owner: str) -> list[BlockRef]:
        """Like ``abandon``, but a copy may still write: the slots rest until ``drained``."""
        refs = []
        for key in self._require_reserved(keys, owner):
            ref = self._reserved.pop(key).ref
            self._quarantined[ref.slots] = ref
            refs.append(ref)
        return refs

    def drained(self, refs: Iterable[BlockRef]) -> None:
        """Nothing writes to these quarantined slots any more: they are free."""
        for ref in refs:
            self._slots.give_back(self._quarantined.pop(ref.slots))

    def lookup(self, keys: Iterable[BlockKey]) -> list[bool]:
        """Whether each block is here. Does not count as a use."""
        return [key in self._committed for key in keys]

    def lease(
        self, keys: Sequence[BlockKey], owner: str, now: float
    ) -> tuple[int, list[BlockRef | None]]:
        """Protect the blocks that are here from eviction for a while; counts as a use.

        Returns the lease's id and where each block is, None if it is not here.
        """
        self._leases.expire(now)
        here = [key for key in dict.fromkeys(keys) if key in self._committed]
        self.touch(here, now)
        number = self._leases.add(owner, here, now)
        return number, [self._committed.get(key) for key in keys]

    def release(self, lease: int, owner: str) -> None:
        """End a lease. One that ran out is legal to release."""
        self._leases.release(lease, owner)

    def touch(self, keys: Iterable[BlockKey], now: float) -> None:
        """Those of the blocks that are here were used."""
        for key in keys:
            if key in self._committed:
                self._order.touch(key, now)

    def set_counted(self, keys: Iterable[BlockKey], counted: bool) -> None:
        """Active branches need the blocks, or don't. Remembered for blocks that come later."""
        for key in keys:
            if counted:
                self._counted.add(key)
            else:
                self._counted.discard(key)
            self._order.set_counted(key, counted)

    def drop_owner(self, owner: str) -> None:
        """A connection is gone, and with it the process that wrote: free what it held. O(all)."""
        lost = [key for key, entry in self._reserved.items() if entry.owner == owner]
        self.abandon(lost, owner)
        self._leases.drop_owner(owner)

    def count_dropped(self, blocks: int) -> None:
        """A writer skipped blocks by itself, because too many were waiting."""
        self._write_dropped += blocks

    def drain_changes(self) -> tuple[tuple[BlockKey, ...], tuple[BlockKey, ...]]:
        """Blocks (stored, removed) since the last call; of a block that did both, the last."""
        changes, self._changes = self._changes, {}
        stored = tuple(key for key, present in changes.items() if present)
        return stored, tuple(key for key, present in changes.items() if not present)

    def keys(self) -> tuple[BlockKey, ...]:
        """All committed blocks: the inventory for a new controller."""
        return tuple(self._committed)

    def expire_leases(self, now: float) -> None:
        """Forget the leases whose time is up; whoever reserves or leases does it, too."""
        self._leases.expire(now)

    def stats(self) -> StoreStats:
        """O(blocks counted)."""
        return StoreStats(
            capacity=self._capacity,
            committed=len(self._committed),
            counted=sum(key in self._committed for key in self._counted),
            reserved=len(self._reserved),
            leased=self._leases.num_keys(),
            quarantined=len(self._quarantined),
            written=self._written,
            deduplicated=self._deduplicated,
            evicted=self._evicted,
            write_dropped=self._write_dropped,
        )

    def check(self) -> None:
        """Every slot is in exactly one state; every count agrees with a recount. O(slots)."""
        refs = [entry.ref for entry in self._reserved.values()]
        refs += [*self._committed.values(), *self._quarantined.values()]
        used = [slot for ref in refs for slot in ref.slots]
        every = sorted([*used, *self._slots.free_slots()])
        assert every == list(range(self._capacity * self._shards)), "every slot is in one state"
        assert not self._reserved.keys() & self._committed.keys(), "a block has one state"
        assert set(self._order.victims()) == self._committed.keys(), "the order knows all blocks"
        self._leases.check()

    def _is_known(self, key: BlockKey) -> bool:
        return key in self._committed or key in self._reserved

    def _make_room(self, blocks: int) -> None:
        missing = blocks - len(self._slots) // self._shards
        if missing <= 0:
            return
        victims: list[BlockKey] = []
        for key in self._order.victims():
            if key not in self._leases:
                victims.append(key)
            if len(victims) == missing:
                break
        for key in victims:
            self._slots.give_back(self._committed.pop(key))
            self._order.remove(key)
            self._changes[key] = False
        self._evicted += len(victims)

    def _require_reserved(self, keys: Iterable[BlockKey], owner: str) -> list[BlockKey]:
        checked = list(dict.fromkeys(keys))
        for key in checked:
            entry = self._reserved.get(key)
            if entry is None or entry.owner != owner:
                raise StateError(f"block {key.hex()[:16]} is not reserved by {owner}")
        return checked
