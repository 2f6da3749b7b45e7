"""Fetch: peer L2 -> own L2, while the request waits in the queue.

    planned -> copying -> local | abandoned

A fetch that the plan asks for leases the blocks at the peer, copies them chunk by chunk into
reserved slots and commits what was verified. At its deadline it ends with what has arrived. Slots
to which a copy may still write are quarantined until that copy is drained, so late bytes never
land in a slot reused.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from evolving_infra.errors import PeerError, StateError
from evolving_infra.kv.node_store import NodeStore
from evolving_infra.kv.peers import Peers
from evolving_infra.kv.transport.transport import BlockMove, ReadTicket, Transport
from evolving_infra.types import BlockKey

CHUNK_BYTES = 8 << 20
"""Read and committed at a time; a failure or a deadline costs at most one chunk."""


class FetchState(str, Enum):
    """How a fetch ended: with all blocks here, or without some."""

    LOCAL = "local"
    ABANDONED = "abandoned"


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchResult:
    """``arrived``: which of the keys are local now, in the order asked. ``reason``: why not all."""

    state: FetchState
    arrived: tuple[BlockKey, ...]
    fetched_blocks: int
    seconds: float
    reason: str = ""


class _Job:
    """One fetch in progress."""

    def __init__(self, ticket: str, address: str) -> None:
        self.owner = f"fetch {ticket}"
        self.address = address
        self.reason = ""
        self.fetched_blocks = 0
        self.task: asyncio.Task[None] | None = None


class Fetcher:
    """All fetches of one store. Runs on the store's event loop; copies run in threads."""

    def __init__(
        self,
        *,
        store: NodeStore,
        peers: Peers,
        transport: Transport,
        block_bytes: int,
        clock: Callable[[], float],
        on_commit: Callable[[], None],
    ) -> None:
        self._store = store
        self._peers = peers
        self._transport = transport
        self._block_bytes = block_bytes
        self._clock = clock
        self._on_commit = on_commit
        self._jobs: dict[str, _Job] = {}
        self._arriving: dict[BlockKey, asyncio.Future[bool]] = {}
        self.fetched_blocks = 0

    async def fetch(
        self, ticket: str, address: str, keys: Sequence[BlockKey], deadline_s: float
    ) -> FetchResult:
        """Make ``keys`` local, from the store at ``address``, in at most ``deadline_s`` seconds.

        Blocks that are here already or that another ticket is copying are not copied again.
        Never raises for a dead, silent or foreign peer: the result says what arrived.

        Raises:
            StateError: a fetch of this ticket is running.
        """
        if ticket in self._jobs:
            raise StateError(f"fetch {ticket} is already running")
        started = self._clock()
        job = self._jobs[ticket] = _Job(ticket, address)
        job.task = asyncio.create_task(self._run(job, list(dict.fromkeys(keys))))
        try:
            await asyncio.wait({job.task}, timeout=deadline_s)
        finally:
            finished = job.task.done() and not job.task.cancelled()
            job.task.cancel()
            del self._jobs[ticket]
        await asyncio.wait({job.task})  # its clean-up does not wait for anything
        if finished:
            job.task.result()
        elif not job.reason:
            job.reason = f"{address} did not deliver in {deadline_s} s"
        here = self._store.lookup(keys)
        arrived = tuple(key for key, present in zip(keys, here, strict=True) if present)
        complete = len(arrived) == len(keys)
        return FetchResult(
            state=FetchState.LOCAL if complete else FetchState.ABANDONED,
            arrived=arrived,
            fetched_blocks=job.fetched_blocks,
            seconds=self._clock() - started,
            reason="" if complete else job.reason or f"{address} lacks some of the blocks",
        )

    def cancel(self, ticket: str) -> None:
        """End a fetch now; it answers with what has arrived. Unknown tickets are legal."""
        job = self._jobs.get(ticket)
        if job is not None and job.task is not None:
            job.reason = "cancelled"
            job.task.cancel()

    async def close(self) -> None:
        """Cancel all fetches."""
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, job: _Job, keys: list[BlockKey]) -> None:
        """Copy what nobody else copies, then see what became of the rest; again if it failed."""
        while keys:
            others = {key: self._arriving[key] for key in keys if key in self._arriving}
            own = [key for key in keys if key not in others]
            await self._copy_own(job, own)
            if others:
                await asyncio.wait(others.values())
            keys = [key for key, future in others.items() if not future.result()]

    async def _copy_own(self, job: _Job, keys: list[BlockKey]) -> None:
        absent = [k for k, here in zip(keys, self._store.lookup(keys), strict=True) if not here]
        refs = self._store.reserve(absent, job.owner, self._clock(), is_write=False)
        local = {ref.key: ref for ref in refs if ref is not None}
        if len(local) < len(absent):
            job.reason = "no room for some of the blocks, or they are being written"
        loop = asyncio.get_running_loop()
        self._arriving.update({key: loop.create_future() for key in local})
        pending = set(local)
        try:
            if local:
                peer = await self._peers.get(job.address)
                lease, remote = await peer.lease(list(local))
                try:
                    moves = [BlockMove(ref, local[ref.key]) for ref in remote if ref is not None]
                    for chunk in self._chunks(moves):
                        await self._copy_chunk(job, peer.session, chunk, pending)
                finally:
                    peer.release(lease)
        except PeerError as error:
            job.reason = str(error)
        finally:
            self._give_up(job, pending)

    async def _copy_chunk(
        self, job: _Job, session: object, chunk: list[BlockMove], pending: set[BlockKey]
    ) -> None:
        keys = [move.local.key for move in chunk]
        ticket = self._transport.read(session, chunk)
        try:
            flags = await asyncio.shield(asyncio.wrap_future(ticket.drained))
        except asyncio.CancelledError:
            pending.difference_update(keys)
            self._quarantine(job, ticket, keys)
            raise
        arrived = [key for key, flag in zip(keys, flags, strict=True) if flag]
        self._store.commit(arrived, job.owner, self._clock())
        pending.difference_update(arrived)
        self._resolve(arrived, True)
        job.fetched_blocks += len(arrived)
        self.fetched_blocks += len(arrived)
        self._on_commit()

    def _quarantine(self, job: _Job, ticket: ReadTicket, keys: list[BlockKey]) -> None:
        self._transport.cancel(ticket)
        refs = self._store.quarantine(keys, job.owner)
        loop = asyncio.get_running_loop()
        ticket.drained.add_done_callback(
            lambda _: loop.call_soon_threadsafe(self._store.drained, refs)
        )
        self._resolve(keys, False)

    def _give_up(self, job: _Job, keys: set[BlockKey]) -> None:
        """Nothing writes to these: no read of them was started, or it was drained."""
        self._store.abandon(keys, job.owner)
        self._resolve(keys, False)

    def _resolve(self, keys: "list[BlockKey] | set[BlockKey]", arrived: bool) -> None:
        for key in keys:
            self._arriving.pop(key).set_result(arrived)

    def _chunks(self, moves: list[BlockMove]) -> Iterator[list[BlockMove]]:
        size = max(1, CHUNK_BYTES // self._block_bytes)
        for first in range(0, len(moves), size):
            yield moves[first : first + size]
