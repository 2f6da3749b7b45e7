"""Block references as the arrays that ops take."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from evolving_infra.kv.slots import BlockRef
from evolving_infra.ops.host_blocks import HostBlocks


def host_blocks_of(memory: NDArray[np.uint8], refs: Sequence[BlockRef], shards: int) -> HostBlocks:
    """The blocks of ``refs`` in the pool mapped at ``memory``."""
    shape = (len(refs), shards)
    return HostBlocks(
        memory=memory,
        keys=tuple(ref.key for ref in refs),
        slots=np.array([ref.slots for ref in refs], dtype=np.int64).reshape(shape),
        generations=np.array([ref.generations for ref in refs], dtype=np.uint64).reshape(shape),
    )


def leading(refs: Sequence[BlockRef | None]) -> list[BlockRef]:
    """References up to the first one missing."""
    prefix: list[BlockRef] = []
    for ref in refs:
        if ref is None:
            break
        prefix.append(ref)
    return prefix
