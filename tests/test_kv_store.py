"""A real store and real clients: sockets, fds, shared memory."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from evolving_infra.errors import BackendMissing, InputError, PeerError, StateError
from evolving_infra.kv.channel import connect
from evolving_infra.kv.handoff import open_handoff
from evolving_infra.kv.store_client import StoreClient
from evolving_infra.kv.transport.choose import choose_transport
from evolving_infra.ops.host_blocks import HostBlocks
from evolving_infra.ops.kv_offload import kv_offload
from evolving_infra.ops.kv_restore import kv_restore
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
    store_at,
    write_pages,
)
from tests.test_ops_samples import GQA, MLA, key_of, random_pools


@pytest.fixture
def address(tmp_path: Path) -> str:
    return address_in(tmp_path, "store")


@pytest.mark.parametrize("layout", [MLA, GQA], ids=["mla", "gqa"])
def test_what_is_written_comes_back(address: str, layout: KvLayout) -> None:
    async def main() -> None:
        pools = random_pools(layout, NUM_PAGES, seed=1)
        async with (
            store_at(address, layout=layout, blocks=8) as server,
            client_of(address, layout=layout) as client,
        ):
            assert await write_pages(client, pools, [3, 1, 2], layout) == (0, 1, 2)
            assert server.store.lookup([KEYS[1], KEYS[0]]) == [True, False]
            wanted = [KEYS[3], KEYS[1], KEYS[0], KEYS[2], KEYS[9]]
            blocks, _ = await client.host_blocks(wanted)
            assert server.store.stats().leased == 3
            assert blocks.keys == tuple(wanted[:4]), "up to the last one present"
            assert [blocks.run_end(first) for first in range(5)] == [2, 2, 2, 4, 4]
            assert (blocks.slots[2] == -1).all()
            assert holds(blocks.part(0, 2), pools, [3, 1], layout)
            assert holds(blocks.part(3, 4), pools, [2], layout)
            with pytest.raises(InputError, match="slots: expected slots in"):
                holds(blocks, pools, [3, 1, 0, 2], layout)
            assert len(await local_blocks(client, [KEYS[8], KEYS[9]])) == 0

    run(main())


def test_blocks_that_are_there_are_not_written_again(address: str) -> None:
    async def main() -> None:
        pools = random_pools(MLA, NUM_PAGES, seed=1)
        async with store_at(address, blocks=8) as server, client_of(address) as client:
            await write_pages(client, pools, [0, 1])
            assert await write_pages(client, pools, [0, 2, 1]) == (1,)
            assert await write_pages(client, pools, [0, 1]) == ()
            server.store.check()
            stats = server.stats()
            assert (stats["written"], stats["deduplicated"]) == (3, 4)
            assert stats["capacity"] == 8

    run(main())


def test_the_pool_and_its_kv_survive_their_writer(address: str) -> None:
    async def main() -> None:
        pools = random_pools(MLA, NUM_PAGES, seed=1)
        async with store_at(address, blocks=8) as server:
            async with client_of(address) as client:
                await write_pages(client, pools, [0, 1])
                await client.reserve([KEYS[5]])
                await client.lease([KEYS[0]])
            async with client_of(address) as client:
                while server.store.stats().reserved:
                    await asyncio.sleep(0)
                assert server.store.stats().leased == 0
                assert holds(await local_blocks(client, KEYS[:2]), pools, [0, 1])

    run(main())


def test_a_failed_offload_gives_its_slots_back(address: str) -> None:
    def offload(blocks: HostBlocks, indices: tuple[int, ...]) -> None:
        raise InputError("no such page")

    async def main() -> None:
        async with store_at(address, blocks=2) as server, client_of(address) as client:
            with pytest.raises(InputError, match="no such page"):
                await client.write(offload, KEYS[:2])
            assert server.store.stats().reserved == 0
            assert server.store.lookup(KEYS[:2]) == [False, False]

    run(main())


def test_writes_beyond_the_queue_are_dropped_and_counted(address: str) -> None:
    async def main() -> None:
        pools = random_pools(MLA, NUM_PAGES, seed=1)
        async with (
            store_at(address, blocks=8) as server,
            client_of(address, write_queue_blocks=2) as client,
        ):
            assert await write_pages(client, pools, [0, 1, 2]) == ()
            assert client.write_dropped == 3
            burst = await asyncio.gather(*(write_pages(client, pools, [i]) for i in range(5)))
            assert burst == [(0,), (0,), (), (), ()]
            assert await write_pages(client, pools, [4, 5]) == (0, 1), "there is room again"
            assert server.stats()["write_dropped"] == client.write_dropped == 6

    run(main())


def test_eviction_is_seen_through_the_generation(address: str) -> None:
    """References taken before the slots were reused are misses, not other blocks."""

    async def main() -> None:
        pools = random_pools(MLA, NUM_PAGES, seed=1)
        async with store_at(address, blocks=2), client_of(address) as client:
            await write_pages(client, pools, [0, 1])
            old = await local_blocks(client, KEYS[:2])
            await write_pages(client, pools, [2, 3])
            assert not holds(old, pools, [0, 1])
            assert holds(await local_blocks(client, KEYS[2:4]), pools, [2, 3])

    run(main())


def test_uses_and_counts_order_eviction(address: str) -> None:
    async def main() -> None:
        pools = random_pools(MLA, NUM_PAGES, seed=1)
        async with store_at(address, blocks=3) as server, client_of(address) as client:
            await write_pages(client, pools, [0, 1, 2])
            server.store.set_counted([KEYS[0], KEYS[2]], True)
            server.store.set_counted([KEYS[2]], False)
            await local_blocks(client, [KEYS[1]])
            await write_pages(client, pools, [3])
            assert server.store.lookup(KEYS[:4]) == [True, True, False, True]
            await write_pages(client, pools, [4])
            assert server.store.lookup(KEYS[:5]) == [True, False, False, True, True]

    run(main())


def test_changes_are_told_in_order(address: str) -> None:
    async def main() -> None:
        pools = random_pools(MLA, NUM_PAGES, seed=1)
        present: set[bytes] = set()
        told = asyncio.Event()

        def on_change(stored: tuple[bytes, ...], removed: tuple[bytes, ...]) -> None:
            present.difference_update(removed)
            present.update(stored)
            told.set()

        async with (
            store_at(address, blocks=2, on_change=on_change) as server,
            client_of(address) as client,
        ):
            for pages in ([0, 1], [2], [3]):
                await write_pages(client, pools, pages)
            while present != {KEYS[2], KEYS[3]}:
                told.clear()
                await told.wait()
            assert set(server.store.keys()) == present

    run(main())


def test_handoff_reads_the_other_nodes_pool(address: str) -> None:
    async def main() -> None:
        pools = random_pools(MLA, NUM_PAGES, seed=1)
        async with (
            store_at(address, blocks=8) as server,
            client_of(address) as prefill,
            client_of(address, writable=False) as decode,
        ):
            await write_pages(prefill, pools, [0, 1, 2])
            whole = await open_handoff(decode, KEYS[:2], KEYS[2])
            assert whole.has_tail
            assert holds(whole.blocks, pools, [0, 1, 2])
            assert not whole.blocks.memory.flags.writeable
            assert server.store.stats().leased == 3
            decode.release(whole.lease)
            gap = await open_handoff(decode, [KEYS[0], KEYS[9], KEYS[1]], KEYS[2])
            assert (gap.has_tail, len(gap.blocks)) == (False, 1)
            bare = await open_handoff(decode, KEYS[:2])
            assert (bare.has_tail, len(bare.blocks)) == (False, 2)

    run(main())


def test_a_dead_store_ends_its_clients(address: str) -> None:
    async def main() -> None:
        pools = random_pools(MLA, NUM_PAGES, seed=1)
        async with store_at(address, blocks=8):
            client = await StoreClient.connect(address, SECRET, MLA)
            await write_pages(client, pools, [0, 1])
            blocks = await local_blocks(client, KEYS[:2])
            assert not client.closed.is_set()
        await client.closed.wait()
        with pytest.raises(PeerError):
            await client.lease(KEYS[:1])
        with pytest.raises(PeerError):
            await write_pages(client, pools, [3])
        assert holds(blocks, pools, [0, 1]), "what is mapped stays readable"
        client.release(1)
        await client.close()

    run(main())


def test_a_store_takes_the_place_of_a_dead_one(address: str) -> None:
    """Old references are misses in the new one: its generations start elsewhere."""

    async def main() -> None:
        pools = random_pools(MLA, NUM_PAGES, seed=1)
        generations = []
        for _ in range(2):
            async with store_at(address, blocks=2), client_of(address) as client:
                await write_pages(client, pools, [0])
                blocks = await local_blocks(client, KEYS[:1])
                generations.append(int(blocks.generations[0, 0]))
        assert generations[0] != generations[1]

    run(main())


@pytest.mark.parametrize(
    ("op", "fields", "error", "text"),
    [
        ("steal", {}, InputError, "op: expected one of reserve, commit"),
        ("lease", {}, InputError, "keys: expected a list of block keys, got None"),
        ("lease", {"keys": "abc"}, InputError, "keys: expected a list"),
        ("reserve", {"keys": [b"short"]}, InputError, "keys: expected 32 bytes each"),
        ("reserve", {"keys": ["x" * 32]}, InputError, "keys: expected 32 bytes each"),
        ("commit", {"keys": [KEYS[0]]}, StateError, "is not reserved by"),
        ("release", {"lease": -1}, InputError, "lease: expected a non-negative integer"),
        ("dropped", {"blocks": "x"}, InputError, "blocks: expected a non-negative integer"),
        (
            "fetch",
            {"ticket": "t", "peer": "unix:/nowhere", "keys": [], "deadline_s": -1},
            InputError,
            "deadline_s: expected a positive number of seconds, got -1",
        ),
        (
            "fetch",
            {"ticket": "t", "peer": 7, "keys": [], "deadline_s": 1},
            InputError,
            "peer: expected a text, got 7",
        ),
        (
            "fetch",
            {"ticket": "t", "peer": "nowhere", "keys": [KEYS[0]], "deadline_s": 1},
            InputError,
            "address: expected unix:PATH",
        ),
    ],
)
def test_bad_calls_are_named_and_harmless(
    address: str, op: str, fields: dict[str, object], error: type[Exception], text: str
) -> None:
    async def main() -> None:
        async with store_at(address, blocks=2) as server:
            channel = await connect(address, SECRET, name="test")
            reader = asyncio.create_task(channel.run(lambda *_: asyncio.sleep(0)))
            with pytest.raises(error, match=text):
                await channel.call(op, timeout=5, **fields)
            answer = await channel.call("lease", timeout=5, keys=[KEYS[0]])
            assert answer == {"lease": 1, "refs": [None]}
            server.store.check()
            await channel.close()
            await reader

    run(main())


def test_nonsense_in_a_note_ends_only_its_connection(address: str) -> None:
    async def main() -> None:
        async with store_at(address, blocks=2), client_of(address) as client:
            channel = await connect(address, SECRET, name="test")
            channel.tell("release", lease="all")
            await channel.run(lambda *_: asyncio.sleep(0))
            assert channel.closed
            assert (await client.lease([key_of(1)]))[1] == [None]

    run(main())


def test_another_secret_or_layout_is_refused(address: str) -> None:
    async def main() -> None:
        async with store_at(address, blocks=2):
            with pytest.raises(PeerError, match="secret"):
                await StoreClient.connect(address, "not it", MLA)
            with pytest.raises(PeerError, match="another layout"):
                await StoreClient.connect(address, SECRET, GQA)

    run(main())


@pytest.mark.parametrize("name", ["tcp", "mooncake"])
def test_missing_transports_say_why(name: str) -> None:
    wire = WireLayout.of(MLA)
    memory = np.zeros((1, wire.slot_bytes), dtype=np.uint8)
    with pytest.raises(BackendMissing, match=f"transport {name}: .* use shm"):
        choose_transport(name, memory, wire, SECRET)
    with pytest.raises(InputError, match="transport: expected one of shm, tcp, mooncake"):
        choose_transport("pigeon", memory, wire, SECRET)


def test_partial_blocks_keep_their_token_count(address: str) -> None:
    async def main() -> None:
        pools = random_pools(MLA, 2, seed=1)

        def offload(blocks: HostBlocks, indices: tuple[int, ...]) -> None:
            kv_offload(pools, [1], [5], MLA, blocks)

        async with store_at(address, blocks=2), client_of(address) as client:
            await client.write(offload, [KEYS[0]])
            blocks = await local_blocks(client, [KEYS[0]])
            assert kv_restore(blocks, random_pools(MLA, 1, seed=2), [0], MLA) == [5]

    run(main())
