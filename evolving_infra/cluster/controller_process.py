"""Process: the controller of a cluster. ``python -m evolving_infra.cluster.controller_process``."""

import asyncio
import contextlib
import time
from collections.abc import Iterator

from evolving_infra.cluster.connections import accept
from evolving_infra.cluster.controller import Controller
from evolving_infra.cluster.places import Places
from evolving_infra.cluster.process import run
from evolving_infra.config import ClusterConfig
from evolving_infra.control.journal import Journal
from evolving_infra.kv.channel import Channel, serve


async def main(places: Places, secret: str, name: str, stop: asyncio.Event) -> None:
    """Serve until ``stop``, then close every connection."""
    config = places.read_config()
    started = time.monotonic()
    connections: dict[asyncio.Task[None] | None, Channel] = {}
    with _journal(places, config) as journal:
        controller = Controller(config, places.store, lambda: time.monotonic() - started, journal)

        async def on_channel(channel: Channel) -> None:
            connections[asyncio.current_task()] = channel
            try:
                await accept(controller, channel)
            finally:
                del connections[asyncio.current_task()]

        server = await serve(places.controller, secret, on_channel, name="controller")
        await controller.run_timers(stop)
        server.close()
        serving = [task for task in connections if task is not None]
        for channel in list(connections.values()):
            await channel.close()
        if serving:
            await asyncio.wait(serving)


@contextlib.contextmanager
def _journal(places: Places, config: ClusterConfig) -> Iterator[Journal | None]:
    if not config.journal:
        yield None
        return
    # One file a start: a controller that died keeps its own, which shows what led there.
    number = len(list(places.logs.glob("journal-*.jsonl")))
    with (places.logs / f"journal-{number}.jsonl").open("x", buffering=1) as file:
        yield Journal(file, config.control)


if __name__ == "__main__":
    run(main, "The controller of a cluster.")
