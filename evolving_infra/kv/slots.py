"""Slots of a host pool: which are free, and the generation of each."""

from dataclasses import dataclass

from evolving_infra.errors import CapacityError
from evolving_infra.types import BlockKey


@dataclass(frozen=True, slots=True)
class BlockRef:
    """Where one block is, or is to be written: a slot and its generation for each shard."""

    key: BlockKey
    slots: tuple[int, ...]
    generations: tuple[int, ...]


class SlotPool:
    """Free slots. A slot's generation rises each time it is given out, so no two uses share one."""

    def __init__(self, num_slots: int, first_generation: int) -> None:
        self._free = list(range(num_slots - 1, -1, -1))
        self._generations = [first_generation - 1] * num_slots

    def __len__(self) -> int:
        return len(self._free)

    def take(self, key: BlockKey, shards: int) -> BlockRef:
        """Give out one slot per shard. ``CapacityError`` if there are not enough. O(shards)."""
        if len(self._free) < shards:
            raise CapacityError("no free slot", asked=shards, free=len(self._free))
        slots = tuple(self._free.pop() for _ in range(shards))
        for slot in slots:
            self._generations[slot] += 1
        return BlockRef(key, slots, tuple(self._generations[slot] for slot in slots))

    def give_back(self, ref: BlockRef) -> None:
        """The slots of ``ref`` are free again. O(shards)."""
        self._free.extend(ref.slots)

    def free_slots(self) -> tuple[int, ...]:
        return tuple(self._free)
