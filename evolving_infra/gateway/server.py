"""Listens, and stops without cutting off what runs."""

import asyncio

from aiohttp import web

from evolving_infra.cluster.client import Cluster
from evolving_infra.gateway.app import RUNNING, build_app
from evolving_infra.gateway.settings import GatewaySettings

CLOSE_S = 1.0
"""Idle connections have this long to close, after every request is done or aborted."""


class GatewayServer:
    """One listening gateway. ``start`` then ``stop``, each once."""

    def __init__(self, cluster: Cluster, settings: GatewaySettings) -> None:
        self._settings = settings
        app = build_app(cluster, settings)
        self.running = app[RUNNING]
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=CLOSE_S
        )
        self.url = ""

    async def start(self) -> None:
        """Listen. ``url`` is set then.

        Raises:
            OSError: the address can't be taken.
        """
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._settings.host, self._settings.port)
        try:
            await site.start()
        except OSError:
            await self._runner.cleanup()
            raise
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def stop(self) -> int:
        """Stop accepting, let running requests finish until ``shutdown_s``, abort the rest.

        Returns:
            How many requests were aborted.
        """
        for site in self._runner.sites:
            await site.stop()
        aborted = await self.running.drain(self._settings.shutdown_s)
        await self._runner.cleanup()
        return aborted


async def serve(cluster: Cluster, settings: GatewaySettings, stopping: asyncio.Event) -> None:
    """Serve until ``stopping`` is set, then shut down gracefully."""
    server = GatewayServer(cluster, settings)
    await server.start()
    await stopping.wait()
    await server.stop()
