"""Wire blocks of a peer's host pool -> own host pool. Needs no torch."""

import numpy as np

from evolving_infra import _core
from evolving_infra.errors import wrong
from evolving_infra.ops.checks import check_blocks
from evolving_infra.ops.dispatch import core_shape
from evolving_infra.ops.host_blocks import HostBlocks
from evolving_infra.ops.wire_block import WireLayout


def block_copy(
    source: HostBlocks, target: HostBlocks, wire: WireLayout, *, threads: int = 1
) -> list[bool]:
    """Copy block i of ``source`` to the slots of block i of ``target``, same keys.

    Each record is checked after its copy (layout, key, generation, shard, checksum of the words
    copied) and published with the target's generation. Releases the GIL.

    Args:
        source: a peer's pool; the mapping may be read-only and the peer may be writing.
        target: own pool, reserved slots; their records are written.

    Returns:
        For each block, whether all its shards arrived. The slots of a miss hold no valid record.

    Raises:
        InputError: a shape, range or length is wrong, or the keys differ. Nothing was written.

    Moves ``2 * shards * slot_bytes`` per block.
    """
    check_blocks(source, wire)
    check_blocks(target, wire, writable=True)
    if source.keys != target.keys:
        raise wrong("target.keys", "the keys of source", f"{len(target)} other keys")
    arrived = _core.copy_blocks(
        core_shape(wire),
        b"".join(source.keys),
        source.memory,
        np.ascontiguousarray(source.slots),
        np.ascontiguousarray(source.generations),
        target.memory,
        np.ascontiguousarray(target.slots),
        np.ascontiguousarray(target.generations),
        threads,
    )
    return [bool(flag) for flag in arrived]
