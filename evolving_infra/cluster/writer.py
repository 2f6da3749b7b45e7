"""Write-through: full pages of the engine go to the node's host pool, behind the iterations.

Pages stay pinned in the engine until they are written. If the pool can't keep up, or is away, a
block is skipped and counted (``dropped``): writing never delays an iteration.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from evolving_infra.cluster.engine_thread import EngineThread
from evolving_infra.cluster.store_link import StoreLink
from evolving_infra.config import StoreConfig
from evolving_infra.errors import EvolvingInfraError
from evolving_infra.ops.host_blocks import HostBlocks
from evolving_infra.ops.kv_offload import kv_offload
from evolving_infra.types import BlockKey, KvLayout

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Filled:
    """Pages to write."""

    keys: tuple[BlockKey, ...]
    pages: tuple[int, ...]
    token_counts: tuple[int, ...]


class Writer:
    """One queue, written in order by ``run``."""

    def __init__(
        self, config: StoreConfig, layout: KvLayout, engine: EngineThread, link: StoreLink
    ) -> None:
        self._limit = config.write_queue_blocks
        self._layout = layout
        self._engine = engine
        self._link = link
        self._queue: asyncio.Queue[Filled | Callable[[], None]] = asyncio.Queue()
        self._waiting_blocks = 0
        self.dropped = 0

    def put(
        self, keys: tuple[BlockKey, ...], pages: tuple[int, ...], token_counts: tuple[int, ...]
    ) -> None:
        """Queue pages; skip them if too many wait already."""
        if self._waiting_blocks + len(keys) > self._limit:
            self._skip(pages)
            return
        self._waiting_blocks += len(keys)
        self._queue.put_nowait(Filled(keys, pages, token_counts))

    def after_writes(self, action: Callable[[], None]) -> None:
        """Run ``action`` when everything queued so far is written or skipped."""
        self._queue.put_nowait(action)

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            item = await self._queue.get()
            if isinstance(item, Filled):
                await self._write(item)
            else:
                item()

    async def _write(self, filled: Filled) -> None:
        self._waiting_blocks -= len(filled.keys)
        store = self._link.store
        if store is None:
            self._skip(filled.pages)
            return

        def offload(blocks: HostBlocks, indices: tuple[int, ...]) -> None:
            pages = [filled.pages[i] for i in indices]
            counts = [filled.token_counts[i] for i in indices]
            kv_offload(self._engine.pools, pages, counts, self._layout, blocks)

        try:
            await store.write(offload, filled.keys)
        except EvolvingInfraError as error:
            log.info("write-through: %s", error)
            self.dropped += len(filled.keys)
        self._engine.post(lambda engine, now: engine.release(filled.pages))

    def _skip(self, pages: tuple[int, ...]) -> None:
        self.dropped += len(pages)
        self._engine.post(lambda engine, now: engine.release(pages))
