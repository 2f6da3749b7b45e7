"""Block references as the arrays that ops take."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from evolving_infra.errors import PeerError
from evolving_infra.kv.slots import BlockRef
from evolving_infra.ops.host_blocks import MISSING_SLOT, HostBlocks
from evolving_infra.types import BlockKey


def host_blocks_of(memory: NDArray[np.uint8], refs: Sequence[BlockRef], shards: int) -> HostBlocks:
    """The blocks of ``refs`` in the pool mapped at ``memory``.

    Raises:
        PeerError: a reference has not one slot per shard, or one outside the pool.
    """
    for ref in refs:
        if not is_inside(ref, len(memory), shards):
            text = f"{shards} slots of a pool of {len(memory)}"
            raise PeerError(f"the store names slots {list(ref.slots)}, expected {text}")
    shape = (len(refs), shards)
    return HostBlocks(
        memory=memory,
        keys=tuple(ref.key for ref in refs),
        slots=np.array([ref.slots for ref in refs], dtype=np.int64).reshape(shape),
        generations=np.array([ref.generations for ref in refs], dtype=np.uint64).reshape(shape),
    )


def host_blocks_with_gaps(
    memory: NDArray[np.uint8],
    keys: Sequence[BlockKey],
    refs: Sequence[BlockRef | None],
    shards: int,
) -> HostBlocks:
    """The blocks of ``keys`` up to the last one that has a reference, the others missing.

    Raises:
        PeerError: as ``host_blocks_of``.
    """
    index = [i for i, ref in enumerate(refs) if ref is not None]
    present = host_blocks_of(memory, [ref for ref in refs if ref is not None], shards)
    count = index[-1] + 1 if index else 0
    slots = np.full((count, shards), MISSING_SLOT, dtype=np.int64)
    generations = np.zeros((count, shards), dtype=np.uint64)
    slots[index], generations[index] = present.slots, present.generations
    return HostBlocks(memory=memory, keys=tuple(keys[:count]), slots=slots, generations=generations)


def is_inside(ref: BlockRef, num_slots: int, shards: int) -> bool:
    """Whether ``ref`` names one slot per shard, all in a pool of ``num_slots``."""
    return len(ref.slots) == shards and all(0 <= slot < num_slots for slot in ref.slots)


def leading(refs: Sequence[BlockRef | None]) -> list[BlockRef]:
    """References up to the first one missing."""
    prefix: list[BlockRef] = []
    for ref in refs:
        if ref is None:
            break
        prefix.append(ref)
    return prefix
