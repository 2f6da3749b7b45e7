"""The daemon that owns one node's L2: serves the index over channels and the memory by fd.

The engine may crash and come back; the pool stays. What a connection reserved or leased ends
with the connection. Ops and their fields are in ``StoreClient``, which mirrors them.
"""

import asyncio
import contextlib
import os
import secrets as random_secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict

from evolving_infra.config import StoreConfig
from evolving_infra.errors import EvolvingInfraError, PeerError
from evolving_infra.kv.channel import Channel, Fields, serve
from evolving_infra.kv.eviction_order import BlockOrder
from evolving_infra.kv.fetch import Fetcher, FetchResult
from evolving_infra.kv.host_pool import HostPool
from evolving_infra.kv.node_store import NodeStore
from evolving_infra.kv.peers import Peers
from evolving_infra.kv.pool_door import PoolDoor, door_path
from evolving_infra.kv.store_ops import StoreOps
from evolving_infra.kv.transport.choose import choose_transport
from evolving_infra.ops.wire_block import WireLayout
from evolving_infra.types import BlockKey, KvLayout

CHANGES_S = 0.002
"""Changes of this long are told in one batch."""

OnChange = Callable[[tuple[BlockKey, ...], tuple[BlockKey, ...]], None]


class StoreServer:
    """One node's store. ``on_change(stored, removed)`` is called on the loop, in batches.

    Raises on construction:
        CapacityError: the machine has no memory for ``config.blocks``.
    """

    def __init__(
        self,
        name: str,
        address: str,
        secret: str,
        layout: KvLayout,
        config: StoreConfig,
        order: BlockOrder,
        *,
        clock: Callable[[], float],
        on_change: OnChange = lambda stored, removed: None,
        transport: str = "shm",
    ) -> None:
        self.name = name
        self._address = address
        self._secret = secret
        self._config = config
        self._clock = clock
        self.on_change = on_change
        self._wire = WireLayout.of(layout)
        shards = layout.shards
        self._pool = HostPool.create(config.blocks * shards, self._wire.slot_bytes)
        self.store = NodeStore(
            blocks=config.blocks,
            shards=shards,
            lease_s=config.lease_s,
            order=order,
            # Another incarnation's references are never valid here.
            first_generation=1 + random_secrets.randbits(60),
        )
        memory = self._pool.memory
        self._transport = choose_transport(transport, memory, self._wire, secret)
        self._peers = Peers(name, secret, self._transport)
        self._fetcher = Fetcher(
            store=self.store,
            peers=self._peers,
            transport=self._transport,
            block_bytes=self._wire.slot_bytes * shards,
            clock=clock,
            on_commit=self._note_changes,
        )
        self._ops = StoreOps(self.store, self._fetcher, clock)
        self._channels: dict[Channel, str] = {}
        self._num_channels = 0
        self._door: PoolDoor | None = None
        self._server: asyncio.AbstractServer | None = None
        self._telling: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Listen. Sockets that a dead store left at the same path are replaced."""
        door = door_path(self._address)
        self._unlink()
        self._door = PoolDoor(door, self._secret, self._pool, self._wire.digest)
        self._server = await serve(
            self._address, self._secret, self._serve, name=self.name, kind="store"
        )

    async def stop(self) -> None:
        """Close everything. The pool is gone when the last process has unmapped it."""
        assert self._server is not None, "stop follows start"
        assert self._door is not None, "stop follows start"
        self._server.close()
        await self._fetcher.close()
        await self._peers.close()
        for channel in list(self._channels):
            await channel.close()
        await asyncio.to_thread(self._transport.close)
        await asyncio.to_thread(self._door.close)
        if self._telling is not None:
            self._telling.cancel()
            self._tell_changes()
        self._unlink()
        self._pool.close()

    def _unlink(self) -> None:
        door = door_path(self._address)
        for path in (door, door.removesuffix(".fd")):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    async def _serve(self, channel: Channel) -> None:
        self._num_channels += 1
        owner = f"{channel.peer.get('name', 'client')}#{self._num_channels}"
        self._channels[channel] = owner
        try:
            with contextlib.suppress(EvolvingInfraError):  # nonsense in a note ends the connection
                await channel.run(self._handle)
        finally:
            del self._channels[channel]
            self.store.drop_owner(owner)

    async def _handle(self, channel: Channel, op: str, fields: Fields) -> Fields | None:
        try:
            return await self._ops.answer(self._channels[channel], op, fields)
        finally:
            self._note_changes()

    async def fetch(
        self, ticket: str, peer: str, keys: Sequence[BlockKey], deadline_s: float
    ) -> FetchResult:
        """Read ``keys`` from the store at ``peer``, for the store's own sake (prefetch).

        See ``Fetcher.fetch``.
        """
        return await self._fetcher.fetch(f"own {ticket}", peer, keys, deadline_s)

    async def meet(self, address: str) -> bool:
        """Connect to a peer and map its pool before the first fetch needs it. False: not there."""
        try:
            await self._peers.get(address)
        except PeerError:
            return False
        return True

    def stats(self) -> dict[str, int]:
        """``StoreStats`` as a map, and ``fetched_blocks`` since the start."""
        self.store.expire_leases(self._clock())
        return {**asdict(self.store.stats()), "fetched_blocks": self._fetcher.fetched_blocks}

    def _note_changes(self) -> None:
        if self._telling is None:
            loop = asyncio.get_running_loop()
            self._telling = loop.call_later(CHANGES_S, self._tell_changes)

    def _tell_changes(self) -> None:
        self._telling = None
        stored, removed = self.store.drain_changes()
        if stored or removed:
            self.on_change(stored, removed)
