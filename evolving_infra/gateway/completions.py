"""POST /v1/completions."""

from collections.abc import Sequence
from typing import Any

from aiohttp import web

from evolving_infra.gateway.body import read_body
from evolving_infra.gateway.door import FrontDoor
from evolving_infra.gateway.models import check_model
from evolving_infra.gateway.reply import reply
from evolving_infra.gateway.requests import parse_completion


class CompletionShape:
    """Choices hold ``text``; ``token_ids`` and ``prompt_token_ids`` are inside the choices."""

    id_prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def opening(self, index: int, prompt: Sequence[int] | None) -> dict[str, Any] | None:
        if prompt is None:
            return None
        choice = {**self.part(index, "", (), None), "prompt_token_ids": prompt}
        return {"choices": [choice]}

    def part(
        self, index: int, text: str, tokens: Sequence[int] | None, reason: str | None
    ) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": reason}
        return choice if tokens is None else {**choice, "token_ids": tokens}

    def whole(
        self, index: int, text: str, tokens: Sequence[int] | None, reason: str
    ) -> dict[str, Any]:
        return self.part(index, text, tokens, reason)

    def add_prompts(self, body: dict[str, Any], prompts: Sequence[Sequence[int]]) -> None:
        for choice, prompt in zip(body["choices"], prompts, strict=True):
            choice["prompt_token_ids"] = prompt


def routes(door: FrontDoor) -> list[web.RouteDef]:
    """The route, bound to ``door``."""
    shape = CompletionShape()

    async def complete(request: web.Request) -> web.StreamResponse:
        body = await read_body(request)
        check_model(body, door.settings.model)
        return await reply(door, request, parse_completion(body, door.settings), shape)

    return [web.post("/v1/completions", complete)]
