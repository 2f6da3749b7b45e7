"""Process: the controller of a cluster. ``python -m evolving_infra.cluster.controller_process``."""

import asyncio
import time

from evolving_infra.cluster.connections import accept
from evolving_infra.cluster.controller import Controller
from evolving_infra.cluster.places import Places
from evolving_infra.cluster.process import run
from evolving_infra.control.journal import Journal
from evolving_infra.kv.channel import serve


async def main(places: Places, secret: str, name: str, stop: asyncio.Event) -> None:
    """Serve until ``stop``. The journal of events and commands is ``logs/journal.jsonl``."""
    with (places.logs / "journal.jsonl").open("a") as file:
        started = time.monotonic()
        controller = Controller(
            places.read_config(), places.store, lambda: time.monotonic() - started, Journal(file)
        )
        server = await serve(
            places.controller, secret, lambda channel: accept(controller, channel), name="controller"
        )
        await controller.run_timers(stop)
        server.close()


if __name__ == "__main__":
    run(main, "The controller of a cluster.")
