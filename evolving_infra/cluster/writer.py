"""Write-through: full pages of the engine go to the node's host pool, behind the iterations.

Pages stay pinned in the engine until they are written. If the pool can't keep up, or is away, a
block is skipped and counted: writing never delays an iteration.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine

from evolving_infra.cluster.engine_thread import EngineThread
from evolving_infra.cluster.process import guarded
from evolving_infra.cluster.store_link import StoreLink
from evolving_infra.errors import EvolvingInfraError
from evolving_infra.ops.host_blocks import HostBlocks
from evolving_infra.ops.kv_offload import kv_offload
from evolving_infra.types import BlockKey, KvLayout

log = logging.getLogger(__name__)


class Writer:
    """``dropped``: blocks not written because the store was away; the store counts the others."""

    def __init__(self, layout: KvLayout, engine: EngineThread, link: StoreLink) -> None:
        self._layout = layout
        self._engine = engine
        self._link = link
        self._running: set[asyncio.Task[None]] = set()
        self.dropped = 0

    def put(
        self, keys: tuple[BlockKey, ...], pages: tuple[int, ...], token_counts: tuple[int, ...]
    ) -> None:
        """Start to write pages; they are released when that is over."""
        self._start(self._write(keys, pages, token_counts))

    def after_writes(self, action: Callable[[], None]) -> None:
        """Run ``action`` when everything put so far is written or skipped."""
        self._start(self._after(tuple(self._running), action))

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = guarded(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _write(
        self, keys: tuple[BlockKey, ...], pages: tuple[int, ...], token_counts: tuple[int, ...]
    ) -> None:
        def offload(blocks: HostBlocks, indices: tuple[int, ...]) -> None:
            chosen = [pages[i] for i in indices]
            counts = [token_counts[i] for i in indices]
            kv_offload(self._engine.pools, chosen, counts, self._layout, blocks)

        store = self._link.store
        try:
            if store is None:
                self.dropped += len(keys)
            else:
                await store.write(offload, keys)
        except EvolvingInfraError as error:
            log.info("write-through: %s", error)
            self.dropped += len(keys)
        self._engine.post(lambda engine, now: engine.release(pages))

    @staticmethod
    async def _after(writes: tuple[asyncio.Task[None], ...], action: Callable[[], None]) -> None:
        if writes:
            await asyncio.wait(writes)
        action()
