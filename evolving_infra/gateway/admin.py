"""Branch ends, roles, cluster state, health and metrics."""

import asyncio
from typing import Any

from aiohttp import web

from evolving_infra.errors import InputError, PeerError, wrong
from evolving_infra.gateway import fields, sse
from evolving_infra.gateway.body import read_body
from evolving_infra.gateway.door import FrontDoor
from evolving_infra.gateway.failures import HttpError
from evolving_infra.gateway.signals import BRANCH_ID, BRANCH_RULE
from evolving_infra.types import Role


def routes(door: FrontDoor) -> list[web.RouteDef]:
    """The routes, bound to ``door``."""

    async def end_branch(request: web.Request) -> web.Response:
        return await _end_branch(door, request.match_info["branch"])

    async def set_role(request: web.Request) -> web.Response:
        role = _role(await read_body(request))
        return await _set_role(door, request.match_info["node"], role)

    async def state(_: web.Request) -> web.Response:
        return web.json_response(await door.cluster.state(), dumps=sse.to_json)

    async def healthz(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"}, dumps=sse.to_json)

    async def readyz(_: web.Request) -> web.Response:
        return await _readyz(door)

    async def metrics(_: web.Request) -> web.Response:
        return await _metrics(door)

    return [
        web.post("/v1/branches/{branch:.+}/end", end_branch),
        web.get("/v1/cluster/state", state),
        web.post("/v1/cluster/nodes/{node}/role", set_role),
        web.get("/healthz", healthz),
        web.get("/readyz", readyz),
        web.get("/metrics", metrics),
    ]


async def _end_branch(door: FrontDoor, branch: str) -> web.Response:
    if not BRANCH_ID.fullmatch(branch):
        raise wrong("id", BRANCH_RULE, branch)
    try:
        await door.cluster.end_branch(branch)
    except InputError as error:
        raise HttpError(404, str(error), param="id", code="branch_not_found") from None
    door.metrics.branch_ends.inc()
    return web.json_response({"id": branch, "ended": True}, dumps=sse.to_json)


def _role(body: fields.Body) -> Role:
    names = [role.value for role in Role]
    value = body.get("role")
    if value not in names:
        raise wrong("role", f"one of {', '.join(names)}", value)
    return Role(value)


async def _set_role(door: FrontDoor, node: str, role: Role) -> web.Response:
    try:
        result = await door.cluster.set_role(node, role)
    except InputError as error:
        raise HttpError(404, str(error), param="node", code="node_not_found") from None
    door.metrics.role_changes.inc()
    return web.json_response(result, dumps=sse.to_json)


async def _readyz(door: FrontDoor) -> web.Response:
    state = await _state_or_none(door)
    ready = state is not None and state["ready"] is True and not door.running.draining
    body = {"ready": ready}
    return web.json_response(body, status=200 if ready else 503, dumps=sse.to_json)


async def _metrics(door: FrontDoor) -> web.Response:
    text = door.metrics.render(await _state_or_none(door))
    return web.Response(body=text, headers={"Content-Type": door.metrics.content_type})


async def _state_or_none(door: FrontDoor) -> dict[str, Any] | None:
    """The cluster's state, None if it can't be had in time: probes must not hang or fail."""
    try:
        return await asyncio.wait_for(door.cluster.state(), door.settings.state_s)
    except (PeerError, asyncio.TimeoutError):
        return None
