"""A process's view of a node's store: its mapped memory and its index."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from evolving_infra.errors import PeerError
from evolving_infra.kv.channel import Channel, Fields, connect
from evolving_infra.kv.fetch import FetchResult, FetchState
from evolving_infra.kv.fields import int_field, refs_field
from evolving_infra.kv.host_pool import HostPool
from evolving_infra.kv.pool_door import open_pool
from evolving_infra.kv.refs import host_blocks_of, leading
from evolving_infra.kv.slots import BlockRef
from evolving_infra.ops.host_blocks import HostBlocks
from evolving_infra.types import BlockKey, KvLayout

CALL_S = 10.0
FETCH_MARGIN_S = 5.0

Offload = Callable[[HostBlocks, tuple[int, ...]], None]


class StoreClient:
    """Attached to one store until ``close`` or until the store dies.

    Attributes:
        memory: ``[num_slots, slot_bytes]`` uint8, the store's pool; stays mapped if the store dies.
        closed: set when the connection has ended. Calls then raise ``PeerError``.
        write_dropped: blocks skipped because too many were waiting to be written.
    """

    def __init__(
        self, channel: Channel, pool: HostPool, layout: KvLayout, write_queue_blocks: int
    ) -> None:
        self._channel = channel
        self._shards = layout.shards
        self._limit = write_queue_blocks
        self._waiting = 0
        self._writes: set[asyncio.Task[tuple[int, ...]]] = set()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="kv-write")
        self.memory = pool.memory
        self.closed = asyncio.Event()
        self.write_dropped = 0
        self._reader = asyncio.create_task(self._read())

    @staticmethod
    async def connect(
        address: str,
        secret: str,
        layout: KvLayout,
        *,
        name: str = "engine",
        writable: bool = True,
        write_queue_blocks: int = 4096,
        timeout: float = CALL_S,
    ) -> "StoreClient":
        """Attach to the store at ``address`` (``unix:PATH``), in about ``timeout`` seconds.

        ``writable=False`` maps the pool read-only: right for all but the node's own engine.

        Raises:
            PeerError: no store there, another secret, or another layout.
        """
        pool = await asyncio.to_thread(
            open_pool,
            address,
            secret,
            layout_digest=layout.digest(),
            writable=writable,
            timeout=timeout,
        )
        pool.close()  # the mapping stays
        channel = await connect(address, secret, name=name, kind="client")
        return StoreClient(channel, pool, layout, write_queue_blocks)

    async def reserve(self, keys: Sequence[BlockKey]) -> list[BlockRef | None]:
        """Slots to write each block to; None: no need (it is here or on its way) or no room."""
        answer = await self._call("reserve", keys=list(keys))
        return refs_field(answer, keys)

    async def commit(self, keys: Sequence[BlockKey]) -> None:
        """These reserved blocks are written. ``StateError`` if one was not reserved here."""
        await self._call("commit", keys=list(keys))

    async def abandon(self, keys: Sequence[BlockKey]) -> None:
        """These reserved blocks won't be written. ``StateError`` if one was not reserved here."""
        await self._call("abandon", keys=list(keys))

    async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Whether each block is in the store."""
        return list((await self._call("lookup", keys=list(keys)))["present"])

    async def lease(self, keys: Sequence[BlockKey]) -> tuple[int, list[BlockRef | None]]:
        """Lease id and where each block is (None: not there). It ends by itself after a while."""
        answer = await self._call("lease", keys=list(keys))
        return int_field(answer, "lease"), refs_field(answer, keys)

    def release(self, lease: int) -> None:
        """End a lease."""
        self._channel.tell("release", lease=lease)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """These blocks were used: they are evicted later."""
        self._channel.tell("touch", keys=list(keys))

    def set_counted(self, counted: Sequence[BlockKey], uncounted: Sequence[BlockKey]) -> None:
        """Blocks that active branches need from now on, and that they don't any more."""
        self._channel.tell("counted", counted=list(counted), uncounted=list(uncounted))

    async def fetch(
        self, ticket: str, peer: str, keys: Sequence[BlockKey], deadline_s: float
    ) -> FetchResult:
        """Have the store read ``keys`` from the store at ``peer``; see ``Fetcher.fetch``."""
        answer = await self._channel.call(
            "fetch",
            ticket=ticket,
            peer=peer,
            keys=list(keys),
            deadline_s=deadline_s,
            timeout=deadline_s + FETCH_MARGIN_S,
        )
        answer["arrived"] = tuple(answer["arrived"])
        answer["state"] = FetchState(answer["state"])
        return FetchResult(**answer)

    def cancel(self, ticket: str) -> None:
        """End a fetch now; its call answers with what has arrived."""
        self._channel.tell("cancel", ticket=ticket)

    async def stats(self) -> dict[str, int]:
        """``StoreStats`` as a map, and ``fetched_blocks``."""
        return await self._call("stats")

    async def host_blocks(self, keys: Sequence[BlockKey]) -> tuple[HostBlocks, int]:
        """The longest prefix of ``keys`` that is in the store, leased; and the lease to release."""
        lease, refs = await self.lease(keys)
        prefix = leading(refs)
        return host_blocks_of(self.memory, prefix, self._shards), lease

    def blocks_of(self, refs: Sequence[BlockRef]) -> HostBlocks:
        """References as an op wants them."""
        return host_blocks_of(self.memory, refs, self._shards)

    async def write(self, offload: Offload, keys: Sequence[BlockKey]) -> tuple[int, ...]:
        """Write-through: reserve, run ``offload(blocks, indices)`` in a thread, commit.

        ``indices`` say which of ``keys`` are to be written: those the store lacks and has room
        for. Returns them once they are committed. Never waits for room: if too many blocks are
        waiting already, all are skipped and counted.

        Raises:
            PeerError: the store is gone.
            Whatever ``offload`` raises; the slots are given back.
        """
        if self._waiting + len(keys) > self._limit:
            self.write_dropped += len(keys)
            self._channel.tell("dropped", blocks=len(keys))
            return ()
        task = asyncio.create_task(self._write(offload, keys))
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Detach: finishes writes in progress first, so nothing writes to slots given back."""
        await asyncio.gather(*self._writes, return_exceptions=True)
        await asyncio.to_thread(self._writer.shutdown)
        await self._channel.close()
        await self._reader

    async def _write(self, offload: Offload, keys: Sequence[BlockKey]) -> tuple[int, ...]:
        self._waiting += len(keys)
        try:
            return await self._reserve_and_write(offload, keys)
        finally:
            self._waiting -= len(keys)

    async def _reserve_and_write(
        self, offload: Offload, keys: Sequence[BlockKey]
    ) -> tuple[int, ...]:
        refs = await self.reserve(keys)
        granted = [(index, ref) for index, ref in enumerate(refs) if ref is not None]
        if not granted:
            return ()
        indices = tuple(index for index, _ in granted)
        blocks = self.blocks_of([ref for _, ref in granted])
        loop = asyncio.get_running_loop()
        written = False
        try:
            await loop.run_in_executor(self._writer, offload, blocks, indices)
            written = True
        finally:
            if not written:
                with contextlib.suppress(PeerError):
                    await self.abandon(blocks.keys)
        await self.commit(blocks.keys)
        return indices

    async def _call(self, op: str, **fields: Any) -> Fields:
        return await self._channel.call(op, timeout=CALL_S, **fields)

    async def _read(self) -> None:
        try:
            with contextlib.suppress(PeerError):
                await self._channel.run(_refuse)
        finally:
            self.closed.set()


async def _refuse(channel: Channel, op: str, fields: Fields) -> None:
    raise PeerError(f"a store asks its clients nothing, got {op}")
