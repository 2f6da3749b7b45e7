"""Layouts, pools and blocks that the tests of ops and of the data plane use."""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from evolving_infra.ops.host_blocks import HostBlocks
from evolving_infra.ops.wire_block import WireLayout
from evolving_infra.types import Attention, KvLayout

MLA = KvLayout(
    attention=Attention.MLA,
    num_layers=3,
    page_size=16,
    row=80,
    dtype="bfloat16",
    dtype_bytes=2,
    tp_size=2,
)
GQA = KvLayout(
    attention=Attention.GQA,
    num_layers=2,
    page_size=16,
    row=64,
    dtype="float32",
    dtype_bytes=4,
    tp_size=2,
)
ODD = KvLayout(
    attention=Attention.MLA,
    num_layers=3,
    page_size=2,
    row=3,
    dtype="bfloat16",
    dtype_bytes=2,
    tp_size=1,
)
"""Pages of 12 bytes: no vector register fits, and the payload needs padding before its trailer."""
WIDE = KvLayout(
    attention=Attention.GQA,
    num_layers=5,
    page_size=64,
    row=104,
    dtype="bfloat16",
    dtype_bytes=2,
    tp_size=3,
)
"""Records of several checksum stripes."""

LAYOUTS = {"mla": MLA, "gqa": GQA, "odd": ODD, "wide": WIDE}

Pools = list[list[torch.Tensor]]


def key_of(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def random_pools(layout: KvLayout, num_pages: int, seed: int) -> Pools:
    """Random bytes, NaN payloads included."""
    generator = torch.Generator().manual_seed(seed)
    size = num_pages * layout.page_bytes

    def pool() -> torch.Tensor:
        raw = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        return raw.view(getattr(torch, layout.dtype)).view(num_pages, layout.page_size, layout.row)

    first = [pool() for _ in range(layout.num_layers)]
    if layout.shards == 1:
        return [[layer.clone() for layer in first] for _ in range(layout.tp_size)]
    return [[pool() for _ in range(layout.num_layers)] for _ in range(layout.tp_size)]


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def page_is_same(left: Pools, left_page: int, right: Pools, right_page: int) -> bool:
    """Whether a page has the same bytes in every layer of every rank."""
    return all(
        same_bytes(a[left_page], b[right_page])
        for one, other in zip(left, right, strict=True)
        for a, b in zip(one, other, strict=True)
    )


def new_memory(layout: KvLayout, num_slots: int, fill: int = 0) -> NDArray[np.uint8]:
    slot_bytes = WireLayout.of(layout).slot_bytes
    words = np.zeros(num_slots * slot_bytes // 8, dtype=np.uint64)
    memory = words.view(np.uint8).reshape(num_slots, slot_bytes)
    memory[:] = fill
    return memory


def new_blocks(
    layout: KvLayout,
    count: int,
    *,
    memory: NDArray[np.uint8] | None = None,
    generation: int = 7,
    order: Sequence[int] | None = None,
) -> HostBlocks:
    """``count`` blocks; block i is in the slots from ``order[i] * shards`` on."""
    shards = layout.shards
    places = np.array(order if order is not None else range(count), dtype=np.int64)
    slots = places[:, None] * shards + np.arange(shards)
    return HostBlocks(
        memory=new_memory(layout, count * shards, fill=0xA5) if memory is None else memory,
        keys=tuple(key_of(i) for i in range(count)),
        slots=slots.astype(np.int64).reshape(count, shards),
        generations=np.full((count, shards), generation, dtype=np.uint64),
    )
