"""Wire blocks in host memory -> device pages of every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from evolving_infra import _core
from evolving_infra.errors import wrong
from evolving_infra.ops.checks import check_blocks, check_pages, check_pools
from evolving_infra.ops.dispatch import choose_backend, core_shape, pool_addresses
from evolving_infra.ops.host_blocks import HostBlocks
from evolving_infra.ops.wire_block import WireLayout
from evolving_infra.types import KvLayout

if TYPE_CHECKING:
    from torch import Tensor

VERIFY = ("pool", "device")
FAULTS = (None, "zero_restore")


def kv_restore(
    blocks: HostBlocks,
    pools: Sequence[Sequence[Tensor]],
    pages: Sequence[int],
    layout: KvLayout,
    *,
    backend: str = "auto",
    verify: str = "pool",
    threads: int = 1,
    fault: str | None = None,
) -> list[int]:
    """Write block i to page ``pages[i]``: shard s to rank s; a replicated layout to every rank.

    Every record is checked after it was copied: layout, key, generation and shard in its header,
    and the checksum of the words that were copied. A record that fails, or whose shards disagree,
    is a miss; the pages of a miss hold anything. Releases the GIL.

    Args:
        blocks: where from. The mapping may be read-only and its owner may be writing.
        pools: ``[tp_size][num_layers]`` contiguous tensors ``[num_pages, page_size, row]``.
        pages: one per block, distinct (not checked).
        backend: ``core`` (pools in host memory), ``torch`` (reference), or ``auto``.
        verify: ``pool`` as above; ``device`` also reads the pages back and checks them, so that a
            restore that wrote wrong bytes is a miss.
        threads: of the native core.
        fault: ``zero_restore`` writes zeros instead of the data, after the check of the pool.

    Returns:
        Valid tokens of each block, 0 for a miss.

    Raises:
        InputError: a shape, dtype, range or length differs from the above. Nothing was written.
        BackendMissing: ``core`` was named and a pool is not in host memory.

    Moves ``payload_bytes * (1 + tp_size)`` per block of a replicated layout, ``2 * shards *
    payload_bytes`` of a sharded one; ``verify="device"`` reads the written bytes once more.
    """
    wire = WireLayout.of(layout)
    check_blocks(blocks, wire)
    check_pages(pages, len(blocks), check_pools(pools, layout))
    if verify not in VERIFY:
        raise wrong("verify", " or ".join(VERIFY), verify)
    if fault not in FAULTS:
        raise wrong("fault", "zero_restore or None", fault)
    if choose_backend(backend, pools) == "torch":
        from evolving_infra.ops.reference import kv_blocks

        return kv_blocks.kv_restore(
            blocks,
            pools,
            pages,
            wire,
            check_device=verify == "device",
            write_zeros=fault == "zero_restore",
        )
    return _core_restore(blocks, pools, pages, wire, verify, threads=threads, fault=fault)


def _core_restore(
    blocks: HostBlocks,
    pools: Sequence[Sequence[Tensor]],
    pages: Sequence[int],
    wire: WireLayout,
    verify: str,
    *,
    threads: int,
    fault: str | None,
) -> list[int]:
    counts = _core.unpack_blocks(
        core_shape(wire),
        blocks.memory,
        b"".join(blocks.keys),
        np.ascontiguousarray(blocks.slots),
        np.ascontiguousarray(blocks.generations),
        pool_addresses(pools),
        np.asarray(pages, dtype=np.int64),
        int(pools[0][0].shape[0]),
        fault == "zero_restore",
        verify == "device",
        threads,
    )
    return [int(count) for count in counts]
