"""Hand-off: a decode node reads a prompt's KV from the prefill node's store, nothing is fetched.

The decode node maps the prefill node's pool read-only, leases the blocks and restores them right
into its device pages. Its own pool is not involved.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from evolving_infra.kv.refs import leading
from evolving_infra.kv.store_client import StoreClient
from evolving_infra.ops.host_blocks import HostBlocks
from evolving_infra.types import BlockKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Handoff:
    """Leased blocks of a prompt: complete ones in order, then the partial tail if ``has_tail``.

    Valid until ``client.release(lease)`` or the lease's end.
    """

    blocks: HostBlocks
    has_tail: bool
    lease: int


async def open_handoff(
    client: StoreClient, keys: Sequence[BlockKey], tail_key: BlockKey | None = None
) -> Handoff:
    """Lease the longest prefix of ``keys`` at the prefill node, with the tail if all are there.

    ``client`` is attached to the prefill node's store with ``writable=False``. ``PeerError`` if
    that store is gone.
    """
    wanted = [*keys, *([] if tail_key is None else [tail_key])]
    lease, refs = await client.lease(wanted)
    prefix = leading(refs)
    has_tail = tail_key is not None and len(prefix) == len(wanted)
    return Handoff(blocks=client.blocks_of(prefix), has_tail=has_tail, lease=lease)
