"""Peers that are real processes: killed, stopped, resumed, restarted."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from evolving_infra.kv.fetch import FetchState
from evolving_infra.kv.handoff import open_handoff
from evolving_infra.kv.refs import host_blocks_of, leading
from evolving_infra.kv.store_client import StoreClient
from evolving_infra.ops.host_blocks import HostBlocks
from evolving_infra.ops.kv_restore import kv_restore
from tests.test_kv_late_bytes import node
from tests.test_kv_samples import KEYS, SECRET, address_in, client_of, local_blocks, run, store_at
from tests.test_ops_samples import MLA as LAYOUT

ROOT = Path(__file__).resolve().parent.parent
NUM_BLOCKS = 8

PEER = """
import asyncio, hashlib, sys, time
import numpy as np
from evolving_infra.config import StoreConfig
from evolving_infra.control.eviction import eviction_order
from evolving_infra.kv.store_client import StoreClient
from evolving_infra.kv.store_server import StoreServer
from evolving_infra.ops.reference.record import write_record
from evolving_infra.ops.wire_block import WireHeader, WireLayout
from evolving_infra.types import Attention, KvLayout

address, secret, first = sys.argv[1], sys.argv[2], int(sys.argv[3])
layout = KvLayout(attention=Attention.MLA, num_layers=3, page_size=16, row=80,
                  dtype="bfloat16", dtype_bytes=2, tp_size=2)
wire = WireLayout.of(layout)
keys = [hashlib.sha256(str(i).encode()).digest() for i in range(8)]

def fill(blocks, indices):
    for index, key in enumerate(blocks.keys):
        header = WireHeader(digest=wire.digest, key=key, token_count=16, shard=0,
                            generation=int(blocks.generations[index, 0]))
        payload = np.full(layout.payload_bytes, first + index, dtype=np.uint8)
        write_record(blocks.memory[blocks.slots[index, 0]], header, payload, wire)

async def main():
    server = StoreServer("peer", address, secret, layout, StoreConfig(blocks=8),
                         eviction_order("counted"), clock=time.monotonic)
    await server.start()
    client = await StoreClient.connect(address, secret, layout)
    await client.write(fill, keys)
    print("ready", flush=True)
    await asyncio.Event().wait()

assert "torch" not in sys.modules, "a store starts without torch"
asyncio.run(main())
"""


@contextlib.asynccontextmanager
async def peer_process(address: str, first: int = 1) -> AsyncIterator[int]:
    """A store process; block i holds bytes ``first + i``. Yields its pid."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        PEER,
        address,
        SECRET,
        str(first),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        assert await process.stdout.readline() == b"ready\n"
        yield process.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        await process.wait()


def block_bytes(blocks: HostBlocks) -> list[set[int]]:
    """Which byte values each block holds on any rank; empty for a miss."""
    shape = (len(blocks), LAYOUT.page_size, LAYOUT.row)
    pools = [
        [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(LAYOUT.num_layers)]
        for _ in range(LAYOUT.tp_size)
    ]
    counts = kv_restore(blocks, pools, list(range(len(blocks))), LAYOUT, verify="device")
    values = [
        {int(v) for rank in pools for layer in rank for v in layer[i].view(torch.uint8).unique()}
        for i in range(len(blocks))
    ]
    return [found if count else set() for found, count in zip(values, counts, strict=True)]


def expected(first: int = 1) -> list[set[int]]:
    return [{first + i} for i in range(NUM_BLOCKS)]


def test_blocks_of_another_process_arrive(tmp_path: Path) -> None:
    async def main() -> None:
        peer, own = address_in(tmp_path, "peer"), address_in(tmp_path, "own")
        async with peer_process(peer), store_at(own, blocks=8), client_of(own) as client:
            result = await client.fetch("r", peer, KEYS[:NUM_BLOCKS], 30)
            assert result.state is FetchState.LOCAL
            assert block_bytes(await local_blocks(client, KEYS[:NUM_BLOCKS])) == expected()

    run(main())


def test_a_peer_killed_mid_fetch(tmp_path: Path) -> None:
    """What was leased still arrives out of the mapping, verified; then the peer is gone."""

    async def main() -> None:
        peer = address_in(tmp_path, "killed")
        async with node(tmp_path, blocks=8) as own, peer_process(peer) as pid:
            task = asyncio.create_task(own.fetcher.fetch("r", peer, KEYS[:4], 30))
            await own.at_the_gate()
            os.kill(pid, signal.SIGKILL)
            own.transport.gate.set()
            result = await task
            assert result.arrived == KEYS[:4]
            _, refs = own.store.lease(KEYS[:4], "test", 0.0)
            blocks = host_blocks_of(own.pool.memory, leading(refs), 1)
            assert block_bytes(blocks) == expected()[:4]
            after = await own.fetcher.fetch("r", peer, KEYS[4:8], 30)
            assert (after.state, after.arrived) == (FetchState.ABANDONED, ())
            assert own.store.stats().reserved == 0

    run(main())


@pytest.mark.parametrize("known", [False, True], ids=["first contact", "open connection"])
def test_a_stopped_peer_costs_the_deadline_and_comes_back(tmp_path: Path, known: bool) -> None:
    async def main() -> None:
        peer, own = address_in(tmp_path, "peer"), address_in(tmp_path, "own")
        async with (
            peer_process(peer) as pid,
            store_at(own, blocks=8) as store,
            client_of(own) as client,
        ):
            if known:
                assert (await client.fetch("r", peer, KEYS[:1], 30)).arrived == KEYS[:1]
            os.kill(pid, signal.SIGSTOP)
            result = await client.fetch("r", peer, KEYS[1:4], 0.1)
            assert (result.state, result.arrived) == (FetchState.ABANDONED, ())
            assert "did not deliver in 0.1 s" in result.reason
            stats = store.store.stats()
            assert (stats.reserved, stats.quarantined) == (0, 0)
            os.kill(pid, signal.SIGCONT)
            result = await client.fetch("r", peer, KEYS[:NUM_BLOCKS], 30)
            assert result.state is FetchState.LOCAL
            assert block_bytes(await local_blocks(client, KEYS[:NUM_BLOCKS])) == expected()

    run(main())


def test_a_restarted_peer_has_other_contents(tmp_path: Path) -> None:
    """Same address, same keys, other bytes: never a mixture, never the dead one's."""

    async def main() -> None:
        peer, own = address_in(tmp_path, "peer"), address_in(tmp_path, "own")
        async with store_at(own, blocks=8), client_of(own) as client:
            async with peer_process(peer, first=1):
                await client.fetch("r", peer, KEYS[:2], 30)
            async with peer_process(peer, first=100):
                result = await client.fetch("r", peer, KEYS[2:NUM_BLOCKS], 30)
                assert result.state is FetchState.LOCAL, result.reason
            found = block_bytes(await local_blocks(client, KEYS[:NUM_BLOCKS]))
            assert found == [*expected(1)[:2], *expected(100)[2:]]

    run(main())


def test_a_handoff_survives_the_death_of_the_store(tmp_path: Path) -> None:
    async def main() -> None:
        peer = address_in(tmp_path, "peer")
        async with peer_process(peer) as pid:
            client = await StoreClient.connect(peer, SECRET, LAYOUT, writable=False)
            handoff = await open_handoff(client, KEYS[:NUM_BLOCKS])
            os.kill(pid, signal.SIGKILL)
            await client.closed.wait()
            assert block_bytes(handoff.blocks) == expected()
            await client.close()

    run(main())
