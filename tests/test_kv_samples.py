"""Stores, blocks and clients that the data plane's tests use."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from evolving_infra.config import StoreConfig
from evolving_infra.control.eviction import eviction_order
from evolving_infra.kv.store_client import StoreClient
from evolving_infra.kv.store_server import StoreServer
from evolving_infra.ops.host_blocks import HostBlocks
from evolving_infra.ops.kv_offload import kv_offload
from evolving_infra.ops.kv_restore import kv_restore
from evolving_infra.types import BlockKey, KvLayout
from tests.test_ops_samples import MLA, Pools, key_of, page_is_same, random_pools

T = TypeVar("T")
SECRET = "a secret of this test"
NUM_PAGES = 16
KEYS = tuple(key_of(i) for i in range(NUM_PAGES))


def run(main: Coroutine[Any, Any, T], seconds: float = 60) -> T:
    """Run to the end, on a loop of its own; what hangs fails."""

    async def bounded() -> T:
        return await asyncio.wait_for(main, seconds)

    return asyncio.run(bounded())


def address_in(folder: Path, name: str) -> str:
    return f"unix:{folder / name}"


@contextlib.asynccontextmanager
async def store_at(
    address: str, *, layout: KvLayout = MLA, secret: str = SECRET, **options: Any
) -> AsyncIterator[StoreServer]:
    """A running store; keyword options are the store's, ``blocks``, ``lease_s`` its config's."""
    config = StoreConfig(**{k: options.pop(k) for k in ("blocks", "lease_s") if k in options})
    server = StoreServer(
        address.rsplit("/", 1)[1],
        address,
        secret,
        layout,
        config,
        eviction_order(config.eviction),
        clock=time.monotonic,
        **options,
    )
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@contextlib.asynccontextmanager
async def client_of(
    address: str, *, layout: KvLayout = MLA, writable: bool = True, **options: Any
) -> AsyncIterator[StoreClient]:
    client = await StoreClient.connect(address, SECRET, layout, writable=writable, **options)
    try:
        yield client
    finally:
        await client.close()


async def write_pages(
    client: StoreClient, pools: Pools, pages: Sequence[int], layout: KvLayout = MLA
) -> tuple[int, ...]:
    """Write pages as the blocks ``KEYS[page]``, all tokens valid."""

    def offload(blocks: HostBlocks, indices: tuple[int, ...]) -> None:
        chosen = [pages[index] for index in indices]
        kv_offload(pools, chosen, [layout.page_size] * len(chosen), layout, blocks)

    return await client.write(offload, [KEYS[page] for page in pages])


def holds(blocks: HostBlocks, pools: Pools, pages: Sequence[int], layout: KvLayout = MLA) -> bool:
    """Whether the blocks, restored, are these pages."""
    target = random_pools(layout, len(pages), seed=1234)
    restored = list(range(len(pages)))
    counts = kv_restore(blocks, target, restored, layout, verify="device")
    return counts == [layout.page_size] * len(pages) and all(
        page_is_same(pools, page, target, copy) for page, copy in zip(pages, restored, strict=True)
    )


async def local_blocks(client: StoreClient, keys: Sequence[BlockKey]) -> HostBlocks:
    """Up to the last one in the store; the lease is given back at once."""
    blocks, lease = await client.host_blocks(keys)
    client.release(lease)
    return blocks


@contextlib.contextmanager
def silent_listener(address: str) -> Any:
    """Accepts connections and never answers, on a store's sockets."""
    path = address.removeprefix("unix:")
    with contextlib.ExitStack() as stack:
        for place in (path, path + ".fd"):
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            listener.bind(place)
            listener.listen(16)
        yield
