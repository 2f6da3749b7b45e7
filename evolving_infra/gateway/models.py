"""GET /v1/models and /v1/models/{id}, and the check of a request's ``model``."""

from typing import Any

from aiohttp import web

from evolving_infra.gateway import fields, sse
from evolving_infra.gateway.door import FrontDoor
from evolving_infra.gateway.failures import HttpError

ANY_MODEL = "default"


def check_model(body: fields.Body, served: str) -> None:
    """Accept the served model, ``default``, or no name.

    Raises:
        InputError: not a string.
        HttpError: 404 for another model.
    """
    name = fields.text(body, "model")
    if name is not None and name not in (served, ANY_MODEL):
        raise _not_found(name, served)


def routes(door: FrontDoor) -> list[web.RouteDef]:
    """The routes, bound to ``door``."""
    settings = door.settings
    model: dict[str, Any] = {
        "id": settings.model,
        "object": "model",
        "created": door.created,
        "owned_by": "evolving-infra",
        "max_model_len": settings.max_context_tokens,
    }

    async def show_all(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [model]}, dumps=sse.to_json)

    async def show_one(request: web.Request) -> web.Response:
        name = request.match_info["model"]
        if name != settings.model:
            raise _not_found(name, settings.model)
        return web.json_response(model, dumps=sse.to_json)

    return [web.get("/v1/models", show_all), web.get("/v1/models/{model:.+}", show_one)]


def _not_found(name: str, served: str) -> HttpError:
    shown = name if len(name) <= 80 else name[:77] + "..."
    text = f"model: expected {served} or {ANY_MODEL}, got {shown!r}"
    return HttpError(404, text, param="model", code="model_not_found")
