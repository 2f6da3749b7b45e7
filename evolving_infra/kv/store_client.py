"""A process's view of a node's store: its mapped memory and its index."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from evolving_infra.errors import InputError, PeerError
from evolving_infra.kv.channel import HANDSHAKE_S, Channel, Fields, connect
from evolving_infra.kv.fetch import FetchResult, FetchState
from evolving_infra.kv.fields import int_field, refs_field
from evolving_infra.kv.host_pool import HostPool
from evolving_infra.kv.pool_door import open_pool
from evolving_infra.kv.refs import host_blocks_of, host_blocks_with_gaps
from evolving_infra.kv.slots import BlockRef
from evolving_infra.ops.host_blocks import HostBlocks
from evolving_infra.ops.wire_block import WireLayout
from evolving_infra.types import BlockKey, KvLayout

CALL_S = 10.0
"""A store silent for longer is given up."""

FETCH_MARGIN_S = 5.0

Offload = Callable[[HostBlocks, tuple[int, ...]], None]


class StoreClient:
    """Attached to one store until ``close``, or until the store dies or does not answer in time.

    What a store that is late did with a call, or will do, is unknown: the connection is closed, and
    with its end the store frees all slots and leases that it gave out here.

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
        self._may_write = True
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
    ) -> "StoreClient":
        """Attach to the store at ``address`` (``unix:PATH``).

        ``writable=False`` maps the pool read-only: right for all but the node's own engine.

        Raises:
            PeerError: no store there, a silent one, another secret, or another layout.
        """
        # The channel first: if another store takes this one's place in between, it ends.
        channel = await connect(address, secret, name=name, kind="client")
        try:
            pool = await asyncio.to_thread(
                open_pool,
                address,
                secret,
                wire=WireLayout.of(layout),
                writable=writable,
                timeout=HANDSHAKE_S,
            )
        except BaseException:
            await channel.close()
            raise
        pool.close()  # the mapping stays
        return StoreClient(channel, pool, layout, write_queue_blocks)

    async def reserve(self, keys: Sequence[BlockKey]) -> list[BlockRef | None]:
        """Slots to write each block to; None: no need (it is here or on its way) or no room."""
        answer = await self._call("reserve", keys=list(keys))
        with _answered():
            return refs_field(answer, keys)

    async def commit(self, keys: Sequence[BlockKey]) -> None:
        """These reserved blocks are written. ``StateError`` if one was not reserved here."""
        await self._call("commit", keys=list(keys))

    async def abandon(self, keys: Sequence[BlockKey]) -> None:
        """These reserved blocks won't be written. ``StateError`` if one was not reserved here."""
        await self._call("abandon", keys=list(keys))

    async def lease(self, keys: Sequence[BlockKey]) -> tuple[int, list[BlockRef | None]]:
        """Lease id and where each block is (None: not there). It ends by itself after a while."""
        answer = await self._call("lease", keys=list(keys))
        with _answered():
            return int_field(answer, "lease"), refs_field(answer, keys)

    def release(self, lease: int) -> None:
        """End a lease."""
        self._channel.tell("release", lease=lease)

    async def fetch(
        self, ticket: str, peer: str, keys: Sequence[BlockKey], deadline_s: float
    ) -> FetchResult:
        """Have the store read ``keys`` from the store at ``peer``; see ``Fetcher.fetch``.

        If the waiting task is cancelled, so is the fetch.
        """
        try:
            answer = await self._channel.call(
                "fetch",
                ticket=ticket,
                peer=peer,
                keys=list(keys),
                deadline_s=deadline_s,
                timeout=deadline_s + FETCH_MARGIN_S,
            )
        except asyncio.CancelledError:
            self.cancel(ticket)
            raise
        answer["arrived"] = tuple(answer["arrived"])
        answer["state"] = FetchState(answer["state"])
        return FetchResult(**answer)

    def cancel(self, ticket: str) -> None:
        """End a fetch now; its call answers with what has arrived."""
        self._channel.tell("cancel", ticket=ticket)

    async def host_blocks(self, keys: Sequence[BlockKey]) -> tuple[HostBlocks, int]:
        """``keys`` up to the last one that is in the store, leased; and the lease to release.

        Blocks in between that the store lacks are missing: slot -1. ``PeerError`` if the store is
        gone, or names slots that its pool does not have.
        """
        lease, refs = await self.lease(keys)
        return host_blocks_with_gaps(self.memory, keys, refs, self._shards), lease

    def blocks_of(self, refs: Sequence[BlockRef]) -> HostBlocks:
        """References as an op wants them. ``PeerError`` if one is outside the store's pool."""
        return host_blocks_of(self.memory, refs, self._shards)

    async def write(self, offload: Offload, keys: Sequence[BlockKey]) -> tuple[int, ...]:
        """Write-through: reserve, run ``offload(blocks, indices)`` in a thread, commit.

        ``indices`` say which of ``keys`` are to be written: those the store lacks and has room
        for. Returns them once they are committed. Never waits for room: if too many blocks are
        waiting already, all are skipped and counted.

        Raises:
            PeerError: the store is gone or does not answer in time.
            Whatever ``offload`` raises; the slots are given back.
        """
        if self._waiting + len(keys) > self._limit:
            self.write_dropped += len(keys)
            self._channel.tell("dropped", blocks=len(keys))
            return ()
        self._waiting += len(keys)
        task = asyncio.create_task(self._write(offload, keys))
        self._writes.add(task)
        task.add_done_callback(partial(self._written, len(keys)))
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Detach: finishes writes in progress first, so nothing writes to slots given back."""
        await asyncio.gather(*self._writes, return_exceptions=True)
        await self._hang_up()
        await self._reader
        self._writer.shutdown()

    def _written(self, blocks: int, task: "asyncio.Task[tuple[int, ...]]") -> None:
        self._waiting -= blocks
        self._writes.discard(task)

    async def _write(self, offload: Offload, keys: Sequence[BlockKey]) -> tuple[int, ...]:
        refs = await self.reserve(keys)
        granted = [(index, ref) for index, ref in enumerate(refs) if ref is not None]
        if not granted:
            return ()
        indices = tuple(index for index, _ in granted)
        blocks = self.blocks_of([ref for _, ref in granted])
        loop = asyncio.get_running_loop()
        written = False
        try:
            await loop.run_in_executor(self._writer, self._run, offload, blocks, indices)
            written = True
        finally:
            if not written:
                with contextlib.suppress(PeerError):
                    await self.abandon(blocks.keys)
        await self.commit(blocks.keys)
        return indices

    def _run(self, offload: Offload, blocks: HostBlocks, indices: tuple[int, ...]) -> None:
        """In the writer thread."""
        if not self._may_write:
            raise PeerError("the store did not answer in time: its slots are not ours any more")
        offload(blocks, indices)

    async def _call(self, op: str, **fields: Any) -> Fields:
        try:
            return await self._channel.call(op, timeout=CALL_S, **fields)
        except PeerError:
            await self._hang_up()
            raise

    async def _hang_up(self) -> None:
        """End the connection, once nothing writes to the slots that this gives back."""
        if self._channel.closed:
            return
        self._may_write = False
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._writer, lambda: None)  # after the write in progress
        await self._channel.abort()

    async def _read(self) -> None:
        try:
            with contextlib.suppress(PeerError):
                await self._channel.run(_refuse)
        finally:
            self.closed.set()


@contextlib.contextmanager
def _answered() -> Iterator[None]:
    """Fields of an answer that are wrong are the store's fault."""
    try:
        yield
    except InputError as error:
        raise PeerError(f"the store answers nonsense: {error}") from None


async def _refuse(channel: Channel, op: str, fields: Fields) -> None:
    raise PeerError(f"a store asks its clients nothing, got {op}")
