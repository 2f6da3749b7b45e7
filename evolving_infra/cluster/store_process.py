"""Process: one node's store. ``python -m evolving_infra.cluster.store_process --name node0``."""

import asyncio
import logging
import time

from evolving_infra.cluster.counted import CountedBlocks
from evolving_infra.cluster.messages import join_keys, split_keys
from evolving_infra.cluster.places import Places
from evolving_infra.cluster.process import guarded, keep_connected, run
from evolving_infra.control.eviction import eviction_order
from evolving_infra.errors import EvolvingInfraError
from evolving_infra.kv.channel import Channel, Fields
from evolving_infra.kv.store_server import StoreServer
from evolving_infra.types import BlockKey

MEET_PAUSE_S = 0.2

log = logging.getLogger(__name__)


class StoreProcess:
    """Ties a store to the controller: inventory and changes up, hints and prefetches down."""

    def __init__(self, places: Places, secret: str, node: str) -> None:
        config = places.read_config()
        self._config = config.store
        self._channel: Channel | None = None
        self._prefetches: set[asyncio.Task[None]] = set()
        self._numbers = 0
        self.server = StoreServer(
            name=node,
            address=places.store(node),
            secret=secret,
            layout=config.engine.layout,
            config=config.store,
            order=eviction_order(config.store.eviction),
            clock=time.monotonic,
            on_change=self._changed,
        )

        self._counted = CountedBlocks(self.server.store.set_counted)

    async def opened(self, channel: Channel) -> None:
        """A controller is there: tell it everything the pool holds."""
        self._channel = channel
        channel.tell("l2", stored=join_keys(self.server.store.keys()), removed=b"")

    async def handle(self, channel: Channel, op: str, fields: Fields) -> Fields | None:
        """What the controller says."""
        if op == "counted":
            self._counted.told(fields)
        elif op == "missing":
            present = self.server.store.lookup(split_keys(fields["keys"]))
            return {"missing": present.count(False)}
        elif op == "prefetch":
            task = guarded(self._prefetch(channel, fields["source"], split_keys(fields["keys"])))
            self._prefetches.add(task)
            task.add_done_callback(self._prefetches.discard)
        elif op == "stats":
            return self.server.stats()
        return None

    def _changed(self, stored: tuple[BlockKey, ...], removed: tuple[BlockKey, ...]) -> None:
        if self._channel is not None:
            self._channel.tell("l2", stored=join_keys(stored), removed=join_keys(removed))

    async def _prefetch(self, channel: Channel, source: str, keys: tuple[BlockKey, ...]) -> None:
        self._numbers += 1
        try:
            result = await self.server.fetch(
                f"prefetch-{self._numbers}", source, keys, self._config.fetch_deadline_s
            )
        except EvolvingInfraError as error:
            log.info("prefetch: %s", error)
            return
        channel.tell("prefetched", blocks=result.fetched_blocks, seconds=result.seconds)

    async def meet(self, places: Places, node: str) -> None:
        """Open a session to every peer, so that no request waits for one to be opened."""
        for peer in places.read_config().roles:
            while peer != node and not await self.server.meet(places.store(peer)):
                await asyncio.sleep(MEET_PAUSE_S)


async def main(places: Places, secret: str, name: str, stop: asyncio.Event) -> None:
    process = StoreProcess(places, secret, name)
    await process.server.start()
    meeting = guarded(process.meet(places, name))
    await keep_connected(
        places.controller, secret, stop, process.handle, process.opened, kind="store", name=name
    )
    meeting.cancel()
    await process.server.stop()


if __name__ == "__main__":
    run(main, "The store (L2) of one node.")
