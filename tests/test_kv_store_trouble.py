"""Stores that are late, restart or lie: their clients lose the connection, nothing else."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from evolving_infra.errors import PeerError
from evolving_infra.kv import store_client
from evolving_infra.kv.channel import Fields
from evolving_infra.kv.handoff import open_handoff
from evolving_infra.kv.store_client import StoreClient
from evolving_infra.ops.host_blocks import HostBlocks
from tests.test_kv_samples import (
    KEYS,
    NUM_PAGES,
    SECRET,
    address_in,
    client_of,
    run,
    store_at,
    write_pages,
)
from tests.test_ops_samples import MLA, random_pools


@pytest.fixture
def address(tmp_path: Path) -> str:
    return address_in(tmp_path, "store")


@pytest.mark.parametrize("op", ["reserve", "commit"])
def test_a_call_that_a_stopped_store_gets_late_locks_nothing(
    address: str, monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    """The store does it when it wakes up, and nobody hears: the connection's end takes it back."""

    async def main() -> None:
        pools = random_pools(MLA, NUM_PAGES, seed=1)
        async with store_at(address, blocks=4) as server:
            real = server._ops.answer

            async def answers_late(owner: str, asked: str, fields: Fields) -> Fields | None:
                answer = await real(owner, asked, fields)
                if asked == op:
                    await asyncio.Event().wait()
                return answer

            client = await StoreClient.connect(address, SECRET, MLA)
            if op == "commit":
                await client.reserve(KEYS[:5])
            with monkeypatch.context() as patch:
                patch.setattr(server._ops, "answer", answers_late)
                patch.setattr(store_client, "CALL_S", 0.05)
                with pytest.raises(PeerError, match=f"{op}: no answer"):
                    await getattr(client, op)(KEYS[:4])
            await asyncio.wait_for(client.closed.wait(), 10)
            while server._channels:
                await asyncio.sleep(0)
            assert server.store.stats().reserved == 0
            await client.close()
            async with client_of(address) as client:
                assert await write_pages(client, pools, [4, 5, 6, 7]) == (0, 1, 2, 3)

    run(main())


def test_slots_are_given_back_only_when_nothing_writes_to_them(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A late answer ends the connection, but not before the write in progress has ended."""

    async def main() -> None:
        async with store_at(address, blocks=4) as server:
            client = await StoreClient.connect(address, SECRET, MLA)
            begun, go_on = threading.Event(), threading.Event()
            offloads: list[tuple[bytes, ...]] = []

            def offload(blocks: HostBlocks, indices: tuple[int, ...]) -> None:
                offloads.append(blocks.keys)
                begun.set()
                assert go_on.wait(30)

            first = asyncio.create_task(client.write(offload, KEYS[:1]))
            assert await asyncio.to_thread(begun.wait, 30)
            second = asyncio.create_task(client.write(offload, KEYS[1:2]))
            while server.store.stats().reserved < 2:
                await asyncio.sleep(0)

            async def silent(*_: object) -> None:
                await asyncio.Event().wait()

            monkeypatch.setattr(server._ops, "answer", silent)
            monkeypatch.setattr(store_client, "CALL_S", 0.05)
            late = asyncio.create_task(client.lease(KEYS[:1]))
            await asyncio.wait({late}, timeout=0.3)
            assert not late.done()
            assert server.store.stats().reserved == 2
            go_on.set()
            for task in (first, second, late):
                with pytest.raises(PeerError):
                    await task
            assert offloads == [KEYS[:1]], "what had not begun to write does not begin"
            while server._channels:
                await asyncio.sleep(0)
            assert server.store.stats().reserved == 0
            await client.close()

    run(main())


def test_a_store_that_restarts_while_it_is_attached_is_noticed(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Channel and pool of two stores never make one client."""

    async def main() -> None:
        mapped, go_on = threading.Event(), threading.Event()
        real = store_client.open_pool

        def slow(*arguments: Any, **options: Any) -> Any:
            pool = real(*arguments, **options)
            mapped.set()
            assert go_on.wait(30)
            return pool

        monkeypatch.setattr(store_client, "open_pool", slow)
        async with store_at(address, blocks=2) as server:
            connecting = asyncio.create_task(StoreClient.connect(address, SECRET, MLA))
            assert await asyncio.to_thread(mapped.wait, 30)
            while not server._channels:
                await asyncio.sleep(0)
        async with store_at(address, blocks=2):
            go_on.set()
            client = await connecting
            await asyncio.wait_for(client.closed.wait(), 10)
            with pytest.raises(PeerError):
                await client.lease(KEYS[:1])
            await client.close()

    run(main())


@pytest.mark.parametrize(
    "ref",
    [[[99], [1]], [[2], [1]], [[0, 1], [1, 2]], [[], []], [[-1], [1]], [["x"], [1]], 7],
    ids=str,
)
def test_slots_that_a_store_does_not_have_are_its_fault(
    address: str, monkeypatch: pytest.MonkeyPatch, ref: object
) -> None:
    async def main() -> None:
        async with store_at(address, blocks=2) as server, client_of(address) as client:

            async def lie(owner: str, op: str, fields: Fields) -> Fields | None:
                return {"lease": 1, "refs": [ref] * len(fields["keys"])}

            monkeypatch.setattr(server._ops, "answer", lie)
            with pytest.raises(PeerError, match=r"the store (names slots|answers nonsense)"):
                await client.host_blocks(KEYS[:1])
            with pytest.raises(PeerError, match=r"the store (names slots|answers nonsense)"):
                await open_handoff(client, KEYS[:1])
            with pytest.raises(PeerError, match=r"the store (names slots|answers nonsense)"):
                await write_pages(client, random_pools(MLA, NUM_PAGES, seed=1), [0])

    run(main())
