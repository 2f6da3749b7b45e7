"""Meaning of ``kv_offload`` and ``kv_restore`` in plain torch; works on any device."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evolving_infra.ops.host_blocks import HostBlocks
from evolving_infra.ops.reference.record import read_record, write_record
from evolving_infra.ops.wire_block import WireHeader, WireLayout

Pools = Sequence[Sequence[Tensor]]


def kv_offload(
    pools: Pools,
    pages: Sequence[int],
    token_counts: Sequence[int],
    wire: WireLayout,
    blocks: HostBlocks,
) -> None:
    """Block i, shard s := page ``pages[i]`` of rank s, layer after layer."""
    for block, (page, tokens) in enumerate(zip(pages, token_counts, strict=True)):
        for shard in range(wire.shards):
            header = _identity(blocks, block, shard, wire, tokens)
            slot = blocks.memory[blocks.slots[block, shard]]
            write_record(slot, header, _read_pages(pools[shard], page), wire)


def kv_restore(
    blocks: HostBlocks,
    pools: Pools,
    pages: Sequence[int],
    wire: WireLayout,
    *,
    check_device: bool,
    write_zeros: bool,
) -> list[int]:
    """Page ``pages[i]`` of every rank := block i; shard s goes to rank s, a sole shard to all."""
    tokens: list[int] = []
    for block, page in enumerate(pages):
        counts = set()
        for shard in range(wire.shards):
            ranks = pools if wire.shards == 1 else pools[shard : shard + 1]
            found = read_record(
                blocks.memory[blocks.slots[block, shard]],
                _identity(blocks, block, shard, wire, 0),
                wire,
            )
            if found is None:
                counts.add(0)
                continue
            payload, count = found
            written = np.zeros_like(payload) if write_zeros else payload
            for rank in ranks:
                _write_pages(rank, page, written)
            right = all(np.array_equal(_read_pages(rank, page), payload) for rank in ranks)
            counts.add(count if right or not check_device else 0)
        tokens.append(counts.pop() if len(counts) == 1 else 0)
    return tokens


def _identity(
    blocks: HostBlocks, block: int, shard: int, wire: WireLayout, tokens: int
) -> WireHeader:
    return WireHeader(
        digest=wire.digest,
        key=blocks.keys[block],
        generation=int(blocks.generations[block, shard]),
        token_count=tokens,
        shard=shard,
    )


def _read_pages(rank: Sequence[Tensor], page: int) -> NDArray[np.uint8]:
    """``[num_layers * page_bytes]`` uint8 on the host."""
    layers = [layer[page].cpu().contiguous().view(torch.uint8).flatten() for layer in rank]
    return torch.cat(layers).numpy()


def _write_pages(rank: Sequence[Tensor], page: int, payload: NDArray[np.uint8]) -> None:
    staging = torch.from_numpy(payload)
    for layer, part in zip(rank, staging.chunk(len(rank)), strict=True):
        layer[page].copy_(part.view(layer.dtype).view(layer[page].shape))
