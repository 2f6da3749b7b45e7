"""Stands before every route: turns errors into answers, counts requests, refuses while draining."""

import asyncio

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from evolving_infra.errors import EvolvingInfraError
from evolving_infra.gateway.door import FrontDoor
from evolving_infra.gateway.failures import (
    HttpError,
    as_failure,
    failure_response,
    from_aiohttp,
)

CLIENT_GONE = 499
"""The status that counts a request whose client went away, as nginx does."""
PROBES = ("/healthz", "/readyz", "/metrics")


def guard(door: FrontDoor) -> Middleware:
    """The middleware, bound to ``door``."""

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        route = _route(request)
        status = 500
        door.running.enter()
        door.metrics.in_flight.labels(route).inc()
        try:
            response = await _answer(door, request, handler)
            status = response.status
            return response
        except asyncio.CancelledError:
            status = CLIENT_GONE
            raise
        except ConnectionResetError:
            status = CLIENT_GONE
            # Nobody is left to answer: end the connection's task as if it had been cancelled.
            raise asyncio.CancelledError from None
        finally:
            door.running.leave()
            door.metrics.in_flight.labels(route).dec()
            door.metrics.requests.labels(route, str(status)).inc()

    return guarded


async def _answer(door: FrontDoor, request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        if door.running.draining and request.path not in PROBES:
            wait = {"Retry-After": str(door.settings.retry_after_s)}
            raise HttpError(503, "the server is shutting down", headers=wait)
        return await handler(request)
    except EvolvingInfraError as error:
        return failure_response(as_failure(error, door.settings.retry_after_s))
    except web.HTTPException as error:
        return failure_response(from_aiohttp(error, request))


def _route(request: web.Request) -> str:
    """The route's pattern: a label whose values are few."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "unmatched"
