"""Blocks in a mapped host pool: where they are and what they must turn out to be."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evolving_infra.types import BlockKey

MISSING_SLOT = -1
"""In place of every slot of a block that is missing; ops refuse it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostBlocks:
    """References to wire blocks; reading one checks key, generation and checksum after the copy.

    Attributes:
        memory: ``[num_slots, slot_bytes]`` uint8, a mapped host pool (own or a peer's).
        keys: one per block.
        slots: ``[num_blocks, shards]`` int64, row of ``memory`` for each shard; all -1 if
            the block is missing.
        generations: ``[num_blocks, shards]`` uint64, what the slot's header must say.
    """

    memory: NDArray[np.uint8]
    keys: tuple[BlockKey, ...]
    slots: NDArray[np.int64]
    generations: NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.keys)

    def run_end(self, first: int) -> int:
        """End of the run of present blocks that starts at ``first``; ``first`` if it is missing."""
        missing = np.flatnonzero(self.slots[first:, 0] == MISSING_SLOT)
        return first + int(missing[0]) if len(missing) else len(self)

    def part(self, first: int, last: int) -> "HostBlocks":
        """Blocks ``[first, last)``; nothing is copied."""
        return HostBlocks(
            memory=self.memory,
            keys=self.keys[first:last],
            slots=self.slots[first:last],
            generations=self.generations[first:last],
        )
