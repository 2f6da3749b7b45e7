"""Native core: wire-block copies with checksums. Built from csrc/; see csrc/*.hpp for meanings."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

class WireShape:
    def __init__(self, digest: bytes, num_layers: int, page_bytes: int, page_size: int) -> None: ...
    @property
    def trailer_offset(self) -> int: ...
    @property
    def slot_bytes(self) -> int: ...

def copy_path() -> str: ...
def checksum(words: NDArray[np.uint8], first_word: int = 0, portable: bool = False) -> int: ...
def pack_blocks(
    shape: WireShape,
    memory: NDArray[np.uint8],
    keys: bytes,
    slots: NDArray[np.int64],
    generations: NDArray[np.uint64],
    pools: Sequence[Sequence[int]],
    pages: NDArray[np.int64],
    num_pages: int,
    token_counts: NDArray[np.uint32],
    threads: int,
) -> None: ...
def unpack_blocks(
    shape: WireShape,
    memory: NDArray[np.uint8],
    keys: bytes,
    slots: NDArray[np.int64],
    generations: NDArray[np.uint64],
    pools: Sequence[Sequence[int]],
    pages: NDArray[np.int64],
    num_pages: int,
    write_zeros: bool,
    check_device: bool,
    threads: int,
) -> NDArray[np.uint32]: ...
def copy_blocks(
    shape: WireShape,
    keys: bytes,
    source_memory: NDArray[np.uint8],
    source_slots: NDArray[np.int64],
    source_generations: NDArray[np.uint64],
    target_memory: NDArray[np.uint8],
    target_slots: NDArray[np.int64],
    target_generations: NDArray[np.uint64],
    threads: int,
) -> NDArray[np.uint8]: ...
