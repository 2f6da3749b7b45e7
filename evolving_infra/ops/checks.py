"""Checks of what ops are given: once, at the door, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from evolving_infra.errors import wrong
from evolving_infra.ops.host_blocks import HostBlocks
from evolving_infra.ops.wire_block import WireLayout
from evolving_infra.types import KEY_BYTES, KvLayout

if TYPE_CHECKING:
    from torch import Tensor


def check_blocks(blocks: HostBlocks, wire: WireLayout, *, writable: bool = False) -> None:
    """``blocks`` are records of ``wire``, their slots are inside the pool."""
    memory, count = blocks.memory, len(blocks)
    if memory.dtype != np.uint8 or memory.ndim != 2 or memory.shape[1] != wire.slot_bytes:
        shown = f"{memory.dtype} {list(memory.shape)}"
        raise wrong("blocks.memory", f"uint8 [num_slots, {wire.slot_bytes}]", shown)
    if not memory.flags.c_contiguous:
        raise wrong("blocks.memory", "a contiguous mapping", "strides")
    if writable and not memory.flags.writeable:
        raise wrong("blocks.memory", "a writable mapping", "a read-only one")
    for name, array, dtype in (
        ("blocks.slots", blocks.slots, np.int64),
        ("blocks.generations", blocks.generations, np.uint64),
    ):
        if array.dtype != dtype or array.shape != (count, wire.shards):
            shown = f"{array.dtype} {list(array.shape)}"
            raise wrong(name, f"{np.dtype(dtype)} [{count}, {wire.shards}]", shown)
    if any(len(key) != KEY_BYTES for key in blocks.keys):
        raise wrong("blocks.keys", f"{KEY_BYTES} bytes each", sorted(set(map(len, blocks.keys))))
    if count and (blocks.slots.min() < 0 or blocks.slots.max() >= len(memory)):
        shown = f"{blocks.slots.min()} to {blocks.slots.max()}"
        raise wrong("blocks.slots", f"slots in [0, {len(memory)})", shown)


def check_pools(pools: Sequence[Sequence[Tensor]], layout: KvLayout) -> int:
    """``pools`` is ``[tp_size][num_layers]`` tensors of one shape. Returns their ``num_pages``."""
    if len(pools) != layout.tp_size:
        raise wrong("pools", f"{layout.tp_size} ranks", len(pools))
    if not pools[0]:
        raise wrong("pools[0]", f"{layout.num_layers} layers", 0)
    num_pages = int(pools[0][0].shape[0])
    expected = (num_pages, layout.page_size, layout.row)
    for rank, layers in enumerate(pools):
        if len(layers) != layout.num_layers:
            raise wrong(f"pools[{rank}]", f"{layout.num_layers} layers", len(layers))
        for layer, pool in enumerate(layers):
            shape, dtype = tuple(pool.shape), str(pool.dtype).removeprefix("torch.")
            if shape != expected or dtype != layout.dtype or not pool.is_contiguous():
                text = f"contiguous {layout.dtype} {list(expected)}"
                raise wrong(f"pools[{rank}][{layer}]", text, f"{dtype} {list(shape)}")
    return num_pages


def check_pages(pages: Sequence[int], count: int, num_pages: int) -> None:
    """One page per block, all in the pool."""
    if len(pages) != count:
        raise wrong("pages", f"{count}, one per block", len(pages))
    for page in pages:
        if not 0 <= page < num_pages:
            raise wrong("pages", f"pages in [0, {num_pages})", page)


def check_token_counts(token_counts: Sequence[int], count: int, page_size: int) -> None:
    """One count per block, in ``1..page_size``."""
    if len(token_counts) != count:
        raise wrong("token_counts", f"{count}, one per block", len(token_counts))
    for tokens in token_counts:
        if not 1 <= tokens <= page_size:
            raise wrong("token_counts", f"1 to {page_size} tokens", tokens)
