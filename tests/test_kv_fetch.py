"""Fetch between two real stores in one event loop, over Unix sockets and real memfds."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from evolving_infra.errors import StateError
from evolving_infra.kv.channel import Channel, Fields, serve
from evolving_infra.kv.fetch import FetchState
from evolving_infra.kv.host_pool import HostPool
from evolving_infra.kv.pool_door import PoolDoor, door_path
from evolving_infra.kv.store_client import StoreClient
from evolving_infra.kv.store_server import StoreServer
from evolving_infra.ops.wire_block import WireLayout
from evolving_infra.types import KvLayout
from tests.test_kv_samples import (
    KEYS,
    NUM_PAGES,
    SECRET,
    address_in,
    client_of,
    holds,
    local_blocks,
    run,
    silent_listener,
    store_at,
    write_pages,
)
from tests.test_ops_samples import GQA, MLA, Pools, random_pools

Body = Callable[[StoreServer, StoreClient, StoreServer, StoreClient, Pools], Awaitable[None]]


def with_two_nodes(folder: Path, body: Body, layout: KvLayout = MLA, blocks: int = 16) -> None:
    """Run ``body(own store, own client, peer store, peer client, the peer's pools)``."""

    async def main() -> None:
        pools = random_pools(layout, NUM_PAGES, seed=1)
        own, peer = address_in(folder, "own"), address_in(folder, "peer")
        async with (
            store_at(own, layout=layout, blocks=blocks) as own_store,
            store_at(peer, layout=layout, blocks=16) as peer_store,
            client_of(own, layout=layout) as own_client,
            client_of(peer, layout=layout) as peer_client,
        ):
            await body(own_store, own_client, peer_store, peer_client, pools)
            own_store.store.check()
            peer_store.store.check()

    run(main())


@pytest.mark.parametrize("layout", [MLA, GQA], ids=["mla", "gqa"])
def test_fetched_blocks_are_the_peers(tmp_path: Path, layout: KvLayout) -> None:
    async def body(own_store, own, peer_store, peer, pools) -> None:
        await write_pages(peer, pools, range(6), layout)
        result = await own.fetch("r", address_in(tmp_path, "peer"), KEYS[1:6], 10)
        assert (result.state, result.arrived) == (FetchState.LOCAL, KEYS[1:6])
        assert result.fetched_blocks == own_store.stats()["fetched_blocks"] == 5
        assert result.seconds > 0
        assert holds(await local_blocks(own, KEYS[1:6]), pools, range(1, 6), layout)
        await peer.reserve([])
        assert peer_store.store.stats().leased == 0, "the lease was given back"

    with_two_nodes(tmp_path, body, layout)


def test_what_is_local_is_not_fetched(tmp_path: Path) -> None:
    async def body(own_store, own, peer_store, peer, pools) -> None:
        await write_pages(peer, pools, range(4))
        await write_pages(own, pools, [0, 2])
        result = await own.fetch("r", address_in(tmp_path, "peer"), KEYS[:4], 10)
        assert (result.arrived, result.fetched_blocks) == (KEYS[:4], 2)
        again = await own.fetch("r", "unix:/nowhere", KEYS[:4], 10)
        assert (again.state, again.fetched_blocks) == (FetchState.LOCAL, 0)

    with_two_nodes(tmp_path, body)


def test_what_the_peer_lacks_is_said(tmp_path: Path) -> None:
    async def body(own_store, own, peer_store, peer, pools) -> None:
        await write_pages(peer, pools, [0, 2])
        result = await own.fetch("r", address_in(tmp_path, "peer"), KEYS[:3], 10)
        assert result.state is FetchState.ABANDONED
        assert result.arrived == (KEYS[0], KEYS[2])
        assert "lacks some" in result.reason
        assert own_store.store.stats().reserved == 0

    with_two_nodes(tmp_path, body)


def test_a_full_pool_takes_what_fits(tmp_path: Path) -> None:
    async def body(own_store, own, peer_store, peer, pools) -> None:
        await write_pages(peer, pools, range(4))
        await write_pages(own, pools, [8])
        await own.lease([KEYS[8]])
        result = await own.fetch("r", address_in(tmp_path, "peer"), KEYS[:4], 10)
        assert result.arrived == KEYS[:2]
        assert "no room" in result.reason

        stats = own_store.store.stats()
        assert (stats.written, stats.write_dropped) == (1, 0), "fetches are not writes"

    with_two_nodes(tmp_path, body, blocks=3)


def test_both_ways_at_once(tmp_path: Path) -> None:
    async def body(own_store, own, peer_store, peer, pools) -> None:
        await write_pages(peer, pools, range(4))
        await write_pages(own, pools, range(4, 8))
        results = await asyncio.gather(
            own.fetch("r", address_in(tmp_path, "peer"), KEYS[:4], 10),
            peer.fetch("r", address_in(tmp_path, "own"), KEYS[4:8], 10),
        )
        assert [result.fetched_blocks for result in results] == [4, 4]
        assert holds(await local_blocks(own, KEYS[:8]), pools, range(8))
        assert holds(await local_blocks(peer, KEYS[:8]), pools, range(8))

    with_two_nodes(tmp_path, body)


def test_the_same_blocks_for_two_tickets_are_copied_once(tmp_path: Path) -> None:
    async def body(own_store, own, peer_store, peer, pools) -> None:
        await write_pages(peer, pools, range(8))
        place = address_in(tmp_path, "peer")
        one, other, own_wish = await asyncio.gather(
            own.fetch("one", place, KEYS[:6], 10),
            own.fetch("other", place, KEYS[2:8], 10),
            own_store.fetch("prefetch", place, KEYS[4:5], 10),
        )
        assert one.arrived == KEYS[:6]
        assert other.arrived == KEYS[2:8]
        assert own_wish.arrived == KEYS[4:5]
        assert one.fetched_blocks + other.fetched_blocks + own_wish.fetched_blocks == 8

    with_two_nodes(tmp_path, body)


def test_a_ticket_runs_once_at_a_time(tmp_path: Path) -> None:
    async def body(own_store, own, peer_store, peer, pools) -> None:
        with silent_listener(address_in(tmp_path, "silent")):
            running = asyncio.create_task(
                own.fetch("r", address_in(tmp_path, "silent"), KEYS[:1], 30)
            )
            while not own_store.store.stats().reserved:
                await asyncio.sleep(0)
            with pytest.raises(StateError, match="already running"):
                await own.fetch("r", address_in(tmp_path, "peer"), KEYS[:1], 10)
            own.cancel("r")
            result = await running
        assert (result.state, result.reason) == (FetchState.ABANDONED, "cancelled")
        own.cancel("unknown")

    with_two_nodes(tmp_path, body)


def test_nobody_there_costs_nothing(tmp_path: Path) -> None:
    async def body(own_store, own, peer_store, peer, pools) -> None:
        result = await own.fetch("r", address_in(tmp_path, "gone"), KEYS[:2], 1000)
        assert (result.state, result.arrived) == (FetchState.ABANDONED, ())
        assert "can't connect" in result.reason

    with_two_nodes(tmp_path, body)


def test_a_silent_peer_costs_the_deadline_and_nobody_else(tmp_path: Path) -> None:
    async def body(own_store, own, peer_store, peer, pools) -> None:
        await write_pages(peer, pools, range(4))
        silent = address_in(tmp_path, "silent")
        with silent_listener(silent):
            waiting = asyncio.create_task(own.fetch("slow", silent, KEYS[:2], 30))
            while not own_store.store.stats().reserved:
                await asyncio.sleep(0)
            healthy = await own.fetch("fast", address_in(tmp_path, "peer"), KEYS[2:4], 10)
            assert healthy.arrived == KEYS[2:4]
            assert not waiting.done()
            late = await own.fetch("short", silent, KEYS[5:6], 0.05)
            assert (late.state, late.arrived) == (FetchState.ABANDONED, ())
            assert "did not deliver in 0.05 s" in late.reason
            assert not waiting.done()
            own.cancel("slow")
            await waiting
        assert own_store.store.stats().reserved == 0

    with_two_nodes(tmp_path, body)


def test_a_client_that_goes_away_ends_its_fetches(tmp_path: Path) -> None:
    async def body(own_store, own, peer_store, peer, pools) -> None:
        silent = address_in(tmp_path, "silent")
        with silent_listener(silent):
            async with client_of(address_in(tmp_path, "own")) as engine:
                waiting = asyncio.create_task(engine.fetch("slow", silent, KEYS[:2], 30))
                while not own_store.store.stats().reserved:
                    await asyncio.sleep(0)
            await asyncio.wait({waiting})
            assert waiting.exception() is not None
            while own_store.store.stats().reserved:
                await asyncio.sleep(0)

    with_two_nodes(tmp_path, body)


@pytest.mark.parametrize("when", ["before the store has it", "while it waits for the peer"])
def test_who_stops_waiting_for_a_fetch_ends_it(tmp_path: Path, when: str) -> None:
    async def body(own_store, own, peer_store, peer, pools) -> None:
        silent = address_in(tmp_path, "silent")
        with silent_listener(silent):
            waiting = asyncio.create_task(own.fetch("slow", silent, KEYS[:2], 30))
            await asyncio.sleep(0)
            while when != "before the store has it" and not own_store.store.stats().reserved:
                await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait({waiting})
            assert waiting.cancelled()
            for _ in range(5):  # answered after the store was told, and has cleaned up
                await own.reserve([])
            assert own_store.store.stats().reserved == 0
            again = await own.fetch("slow", address_in(tmp_path, "gone"), KEYS[:2], 30)
            assert "can't connect" in again.reason, "the ticket is free again"

    with_two_nodes(tmp_path, body)


def test_a_peer_that_came_back_is_read_anew(tmp_path: Path) -> None:
    """Channel and mapping of the dead store are dropped together."""

    async def main() -> None:
        pools, other = (random_pools(MLA, NUM_PAGES, seed=seed) for seed in (1, 2))
        own, peer = address_in(tmp_path, "own"), address_in(tmp_path, "peer")
        async with store_at(own, blocks=8), client_of(own) as client:
            for number, content in enumerate((pools, other)):
                async with store_at(peer, blocks=8), client_of(peer) as writer:
                    pages = [2 * number, 2 * number + 1]
                    await write_pages(writer, content, pages)
                    keys = [KEYS[page] for page in pages]
                    result = await client.fetch("r", peer, keys, 10)
                    assert len(result.arrived) == 2
                    assert holds(await local_blocks(client, keys), content, pages)
                gone = await client.fetch("r", peer, KEYS[8:9], 10)
                assert gone.state is FetchState.ABANDONED

    run(main())


@pytest.mark.parametrize(
    "answer",
    [
        {"lease": 1, "refs": [[[99], [1]]]},
        {"lease": 1, "refs": [[[2**40], [1]]]},
        {"lease": 1, "refs": [[[0, 1], [1, 1]]]},
        {"lease": 1, "refs": [[[], []]]},
        {"lease": 1, "refs": [[[0], [12345]]]},
        {"lease": 1, "refs": [[[-1], [1]]]},
        {"lease": 1, "refs": [7]},
        {"lease": 1, "refs": []},
        {"lease": 1, "refs": None},
        {"lease": "x", "refs": [None]},
        {},
    ],
    ids=str,
)
def test_a_lying_peer_is_a_miss(tmp_path: Path, answer: Fields) -> None:
    """Slots outside its pool, other generations, nonsense: nothing arrives, nothing breaks."""

    async def lie(channel: Channel, op: str, fields: Fields) -> Fields | None:
        return dict(answer)

    async def main() -> None:
        own, liar = address_in(tmp_path, "own"), address_in(tmp_path, "liar")
        wire = WireLayout.of(MLA)
        pool = HostPool.create(2, wire.slot_bytes)
        door = PoolDoor(door_path(liar), SECRET, pool, wire.digest)
        server = await serve(liar, SECRET, lambda channel: channel.run(lie))
        async with store_at(own, blocks=8) as store, client_of(own) as client:
            result = await client.fetch("r", liar, KEYS[:1], 10)
            assert (result.state, result.arrived) == (FetchState.ABANDONED, ())
            assert store.store.stats().reserved == 0
            store.store.check()
        server.close()
        door.close()
        pool.close()

    run(main())


def test_a_peer_of_another_layout_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        own, peer = address_in(tmp_path, "own"), address_in(tmp_path, "peer")
        async with (
            store_at(own, blocks=8),
            store_at(peer, layout=GQA, blocks=8),
            client_of(own) as client,
        ):
            result = await client.fetch("r", peer, KEYS[:1], 10)
            assert result.arrived == ()
            assert "another layout" in result.reason

    run(main())
