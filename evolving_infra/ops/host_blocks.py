"""Blocks in a mapped host pool: where they are and what they must turn out to be."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evolving_infra.types import BlockKey


@dataclass(frozen=True, slots=True, kw_only=True)
class HostBlocks:
    """References to wire blocks; reading one checks key, generation and checksum after the copy.

    Attributes:
        memory: ``[num_slots, slot_bytes]`` uint8, a mapped host pool (own or a peer's).
        keys: one per block.
        slots: ``[num_blocks, shards]`` int64, row of ``memory`` for each shard.
        generations: ``[num_blocks, shards]`` uint64, what the slot's header must say.
    """

    memory: NDArray[np.uint8]
    keys: tuple[BlockKey, ...]
    slots: NDArray[np.int64]
    generations: NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.keys)

    def part(self, first: int, last: int) -> "HostBlocks":
        """Blocks ``[first, last)``; nothing is copied."""
        return HostBlocks(
            memory=self.memory,
            keys=self.keys[first:last],
            slots=self.slots[first:last],
            generations=self.generations[first:last],
        )
