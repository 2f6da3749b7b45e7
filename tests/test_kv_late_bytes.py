"""A copy that outlives its fetch: its bytes never land in a slot that was given out again."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from evolving_infra.control.eviction import eviction_order
from evolving_infra.kv.fetch import Fetcher, FetchResult, FetchState
from evolving_infra.kv.host_pool import HostPool
from evolving_infra.kv.node_store import NodeStore
from evolving_infra.kv.peers import Peers
from evolving_infra.kv.refs import host_blocks_of
from evolving_infra.kv.transport.shm import ShmTransport
from evolving_infra.kv.transport.transport import BlockMove
from evolving_infra.ops.kv_offload import kv_offload
from evolving_infra.ops.wire_block import WireLayout
from tests.test_kv_samples import (
    KEYS,
    NUM_PAGES,
    SECRET,
    address_in,
    client_of,
    holds,
    run,
    store_at,
    write_pages,
)
from tests.test_ops_samples import MLA, Pools, random_pools

WIRE = WireLayout.of(MLA)


class GatedTransport(ShmTransport):
    """Copies only while the gate is open; ``copying`` is set when a copy waits at it."""

    def __init__(self, pool: HostPool) -> None:
        super().__init__(pool.memory, WIRE, SECRET)
        self.gate = threading.Event()
        self.copying = threading.Event()
        self.tickets: list = []

    def read(self, peer, moves):
        self.tickets.append(super().read(peer, moves))
        return self.tickets[-1]

    def _copy_piece(self, source, moves: tuple[BlockMove, ...]) -> list[bool]:
        self.copying.set()
        assert self.gate.wait(30)
        return super()._copy_piece(source, moves)


@dataclass
class Node:
    pool: HostPool
    store: NodeStore
    transport: GatedTransport
    fetcher: Fetcher
    peer: str
    pools: Pools

    def start(self, ticket: str, keys: tuple[bytes, ...]) -> "asyncio.Task[FetchResult]":
        return asyncio.create_task(self.fetcher.fetch(ticket, self.peer, keys, 30))

    async def at_the_gate(self) -> None:
        assert await asyncio.to_thread(self.transport.copying.wait, 30)

    async def drained(self) -> None:
        for ticket in self.transport.tickets:
            await asyncio.wrap_future(ticket.drained)
        while self.store.stats().quarantined:
            await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def node(folder: Path, blocks: int) -> AsyncIterator[Node]:
    """A fetcher with its gate closed, and a peer that holds all pages."""
    pools = random_pools(MLA, NUM_PAGES, seed=1)
    pool = HostPool.create(blocks, WIRE.slot_bytes)
    store = NodeStore(blocks=blocks, shards=1, lease_s=30, order=eviction_order("counted"))
    transport = GatedTransport(pool)
    peers = Peers("own", SECRET, transport)
    fetcher = Fetcher(
        store=store,
        peers=peers,
        transport=transport,
        block_bytes=WIRE.slot_bytes,
        clock=time.monotonic,
        on_commit=lambda: None,
    )
    peer = address_in(folder, "peer")
    async with store_at(peer, blocks=NUM_PAGES), client_of(peer) as writer:
        await write_pages(writer, pools, range(NUM_PAGES))
        yield Node(pool, store, transport, fetcher, peer, pools)
        transport.gate.set()
        await fetcher.close()
        await peers.close()
        await asyncio.to_thread(transport.close)
    store.check()
    pool.close()


def test_slots_rest_until_the_copy_is_drained(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path, blocks=1) as own:
            task = own.start("late", KEYS[:1])
            await own.at_the_gate()
            own.fetcher.cancel("late")
            result = await task
            assert (result.state, result.arrived) == (FetchState.ABANDONED, ())
            assert not own.transport.tickets[0].drained.done()
            assert own.store.reserve([KEYS[1]], "engine", 1.0) == [None], "nowhere to write"
            own.store.check()
            own.transport.gate.set()
            await own.drained()
            assert own.store.lookup(KEYS[:1]) == [False], "late bytes are not a block"
            (ref,) = own.store.reserve([KEYS[1]], "engine", 2.0)
            assert ref is not None
            blocks = host_blocks_of(own.pool.memory, [ref], 1)
            kv_offload(own.pools, [1], [16], MLA, blocks)
            own.store.commit([KEYS[1]], "engine", 2.0)
            assert holds(blocks, own.pools, [1])

    run(main())


def test_a_deadline_quarantines_too(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path, blocks=2) as own:
            result = await own.fetcher.fetch("late", own.peer, KEYS[:2], 0.2)
            assert result.state is FetchState.ABANDONED
            # Only what a copy had begun to write rests.
            assert own.store.stats().quarantined == (2 if own.transport.tickets else 0)
            assert own.store.stats().reserved == 0
            own.transport.gate.set()
            await own.drained()
            again = await own.fetcher.fetch("again", own.peer, KEYS[:2], 30)
            assert again.arrived == KEYS[:2]

    run(main())


def test_a_stopped_copy_leaves_the_rest_alone(tmp_path: Path) -> None:
    """After a cancel no further piece is copied."""

    async def main() -> None:
        async with node(tmp_path, blocks=NUM_PAGES) as own:
            ticket = own.transport.read(
                await asyncio.to_thread(own.transport.open, own.peer, 5.0), []
            )
            assert await asyncio.wrap_future(ticket.drained) == []
            task = own.start("t", KEYS)
            await own.at_the_gate()
            own.transport.cancel(own.transport.tickets[-1])
            own.transport.gate.set()
            flags = await asyncio.wrap_future(own.transport.tickets[-1].drained)
            assert len(flags) == NUM_PAGES
            await task

    run(main())


def test_who_waited_for_a_cancelled_fetch_fetches_itself(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path, blocks=NUM_PAGES) as own:
            first = own.start("first", KEYS[:4])
            await own.at_the_gate()
            second = own.start("second", KEYS[:6])
            while own.store.stats().reserved < 6:
                await asyncio.sleep(0)
            own.fetcher.cancel("first")
            assert (await first).arrived == ()
            own.transport.gate.set()
            result = await second
            assert result.arrived == KEYS[:6]
            assert result.fetched_blocks == 6

    run(main())
