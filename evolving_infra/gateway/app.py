"""Puts the routes together into one aiohttp application."""

import time
import uuid
from collections.abc import Callable

from aiohttp import web

from evolving_infra.cluster.client import Cluster
from evolving_infra.gateway import admin, chat, completions, models
from evolving_infra.gateway.door import FrontDoor
from evolving_infra.gateway.guard import guard
from evolving_infra.gateway.metrics import GatewayMetrics
from evolving_infra.gateway.running import RunningRequests
from evolving_infra.gateway.settings import GatewaySettings

RUNNING = web.AppKey("running", RunningRequests)
"""The requests in progress of an application."""


def random_id() -> str:
    """32 random hexadecimal digits."""
    return uuid.uuid4().hex


def build_app(
    cluster: Cluster, settings: GatewaySettings, *, new_id: Callable[[], str] = random_id
) -> web.Application:
    """The front door of ``cluster``.

    Serve it with ``handler_cancellation`` on (``GatewayServer`` does): otherwise a request runs on
    after its client went away.
    """
    door = FrontDoor(
        cluster=cluster,
        settings=settings,
        metrics=GatewayMetrics(),
        running=RunningRequests(),
        new_id=new_id,
        clock=time.monotonic,
        created=int(time.time()),
        unix_time=time.time,
    )
    app = web.Application(middlewares=[guard(door)], client_max_size=settings.max_body_bytes)
    app[RUNNING] = door.running
    for part in (completions, chat, models, admin):
        app.add_routes(part.routes(door))
    return app
