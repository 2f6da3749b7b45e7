"""An engine process's connections to stores: its own node's, and peers' for hand-off."""

import asyncio
import contextlib
import logging

from evolving_infra.errors import EvolvingInfraError
from evolving_infra.kv.store_client import StoreClient
from evolving_infra.types import KvLayout

log = logging.getLogger(__name__)

RECONNECT_S = 0.2


class StoreLink:
    """``store`` is this node's store, None while it is down: the engine then goes on without L2."""

    def __init__(
        self, own_address: str, secret: str, layout: KvLayout, write_queue_blocks: int
    ) -> None:
        self._own_address = own_address
        self._secret = secret
        self._layout = layout
        self._write_queue_blocks = write_queue_blocks
        self._peers: dict[str, StoreClient] = {}
        self._opening: dict[str, asyncio.Lock] = {}
        self.store: StoreClient | None = None
        self.attached = asyncio.Event()
        """Set when the own store has been reached for the first time."""

    async def run(self, stop: asyncio.Event) -> None:
        """Keep the own store connected until ``stop``; close everything then."""
        stopping = asyncio.create_task(stop.wait())
        while not stop.is_set():
            try:
                self.store = await StoreClient.connect(
                    self._own_address,
                    self._secret,
                    self._layout,
                    write_queue_blocks=self._write_queue_blocks,
                )
            except EvolvingInfraError as error:
                log.info("%s; trying again", error)
                await asyncio.wait([stopping], timeout=RECONNECT_S)
                continue
            self.attached.set()
            gone = asyncio.create_task(self.store.closed.wait())
            await asyncio.wait([gone, stopping], return_when=asyncio.FIRST_COMPLETED)
            store, self.store = self.store, None
            await store.close()
            gone.cancel()
        stopping.cancel()
        for client in self._peers.values():
            with contextlib.suppress(EvolvingInfraError):
                await client.close()

    async def meet(self, addresses: list[str]) -> None:
        """Open peers' stores ahead of the first hand-off."""
        for address in addresses:
            while True:
                try:
                    await self.peer(address)
                    break
                except EvolvingInfraError:
                    await asyncio.sleep(RECONNECT_S)

    async def peer(self, address: str) -> StoreClient:
        """A read-only client of a peer's store (or of the own one), connected once and kept."""
        async with self._opening.setdefault(address, asyncio.Lock()):
            client = self._peers.get(address)
            if client is None or client.closed.is_set():
                client = await StoreClient.connect(
                    address, self._secret, self._layout, writable=False
                )
                self._peers[address] = client
            return client
