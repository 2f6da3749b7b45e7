"""Process: the gateway of a cluster. ``python -m evolving_infra.gateway``."""

import asyncio

from evolving_infra.cluster.places import Places
from evolving_infra.cluster.process import run
from evolving_infra.cluster.remote import remote_cluster
from evolving_infra.gateway.server import serve
from evolving_infra.gateway.settings import GatewaySettings

SHUTDOWN_S = 3.0
"""Less than the launcher waits before it kills."""


async def main(places: Places, secret: str, name: str, stop: asyncio.Event) -> None:
    """Serve until ``stop``."""
    config = places.read_config()
    settings = GatewaySettings(
        model=config.engine.model,
        max_context_tokens=config.engine.max_context_tokens,
        host=config.host,
        port=config.port,
        shutdown_s=SHUTDOWN_S,
    )
    async with remote_cluster(places.controller, secret) as cluster:
        await serve(cluster, settings, stop)


if __name__ == "__main__":
    run(main, "The gateway of a cluster.")
