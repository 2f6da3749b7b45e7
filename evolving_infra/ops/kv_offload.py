"""Device pages of every rank -> wire blocks in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from evolving_infra import _core
from evolving_infra.ops.checks import check_blocks, check_pages, check_pools, check_token_counts
from evolving_infra.ops.dispatch import choose_backend, core_shape, pool_addresses
from evolving_infra.ops.host_blocks import HostBlocks
from evolving_infra.ops.wire_block import WireLayout
from evolving_infra.types import KvLayout

if TYPE_CHECKING:
    from torch import Tensor


def kv_offload(
    pools: Sequence[Sequence[Tensor]],
    pages: Sequence[int],
    token_counts: Sequence[int],
    layout: KvLayout,
    blocks: HostBlocks,
    *,
    backend: str = "auto",
    threads: int = 1,
) -> None:
    """Write page ``pages[i]`` as block i: shard s from rank s; a replicated layout from rank 0.

    Whole pages are copied, bit for bit, also of blocks with fewer valid tokens. Releases the GIL.

    Args:
        pools: ``[tp_size][num_layers]`` contiguous tensors ``[num_pages, page_size, row]``.
        pages: one per block.
        token_counts: valid tokens of each block, ``1..page_size``.
        blocks: where to: reserved slots, their generations and keys. Their records are written.
        backend: ``core`` (pools in host memory), ``torch`` (reference), or ``auto``.
        threads: of the native core.

    Raises:
        InputError: a shape, dtype, range or length differs from the above. Nothing was written.
        BackendMissing: ``core`` was named and a pool is not in host memory.

    Moves ``2 * shards * payload_bytes`` per block: each byte read once, written once.
    """
    wire = WireLayout.of(layout)
    check_blocks(blocks, wire, writable=True)
    check_pages(pages, len(blocks), check_pools(pools, layout))
    check_token_counts(token_counts, len(blocks), layout.page_size)
    if choose_backend(backend, pools) == "torch":
        from evolving_infra.ops.reference import kv_blocks

        kv_blocks.kv_offload(pools, pages, token_counts, wire, blocks)
        return
    _core.pack_blocks(
        core_shape(wire),
        blocks.memory,
        b"".join(blocks.keys),
        np.ascontiguousarray(blocks.slots),
        np.ascontiguousarray(blocks.generations),
        pool_addresses(pools),
        np.asarray(pages, dtype=np.int64),
        int(pools[0][0].shape[0]),
        np.asarray(token_counts, dtype=np.uint32),
        threads,
    )
