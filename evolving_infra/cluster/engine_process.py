"""Process: one node's engine. ``python -m evolving_infra.cluster.engine_process --name node0``."""

import asyncio
import contextlib
import gc
import os
import time

import torch

from evolving_infra import env
from evolving_infra.cluster.engine_thread import EngineThread
from evolving_infra.cluster.hasher import block_hasher
from evolving_infra.cluster.node import Node
from evolving_infra.cluster.places import Places
from evolving_infra.cluster.process import crash, guarded, keep_connected, run
from evolving_infra.cluster.store_link import StoreLink
from evolving_infra.engine.engine import Engine

NICE = 5
MEASURED_S = 0.25
ATTACH_S = 5.0
"""A store that is away for longer does not keep its engine from serving without L2."""


async def main(places: Places, secret: str, name: str, stop: asyncio.Event) -> None:
    # One compute thread per engine: nodes share this machine, and sums keep one order.
    torch.set_num_threads(1)
    # Stores, controller and gateway run in moments that computing must not delay.
    os.nice(NICE)
    config = places.read_config()
    engine = Engine(config.engine, block_hasher(config.engine), fault=env.fault())
    link = StoreLink(
        places.store(name), secret, config.engine.layout, config.store.write_queue_blocks
    )
    thread = EngineThread(
        engine,
        time.monotonic,
        asyncio.get_running_loop(),
        on_iteration=lambda iteration: node.on_iteration(iteration),
        on_crash=crash,
    )
    node = Node(config, thread, link)
    thread.start()
    # A full collection over torch's objects takes 0.2 s; they live as long as the process.
    gc.collect()
    gc.freeze()
    tasks = [
        guarded(link.run(stop)),
        guarded(_flush_measured(node)),
        guarded(link.meet([places.store(peer) for peer in config.roles])),
    ]
    # Announce the node with its pool, or the first requests would recompute what the pool has.
    waits = [asyncio.create_task(event.wait()) for event in (link.attached, stop)]
    await asyncio.wait(waits, timeout=ATTACH_S, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    await keep_connected(
        places.controller, secret, stop, node.handle, node.opened, kind="engine", name=name
    )
    await tasks[0]
    for task in tasks[1:]:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    thread.stop()


async def _flush_measured(node: Node) -> None:
    while True:
        await asyncio.sleep(MEASURED_S)
        node.flush_measured()


if __name__ == "__main__":
    run(main, "The engine of one node.")
