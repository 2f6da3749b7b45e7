"""POST /v1/chat/completions."""

from collections.abc import Sequence
from typing import Any

from aiohttp import web

from evolving_infra.gateway.body import read_body
from evolving_infra.gateway.door import FrontDoor
from evolving_infra.gateway.models import check_model
from evolving_infra.gateway.reply import reply
from evolving_infra.gateway.requests import parse_chat


class ChatShape:
    """Choices hold a message or its delta; ``prompt_token_ids`` stands beside the choices."""

    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, index: int, prompt: Sequence[int] | None) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        opening: dict[str, Any] = {
            "choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]
        }
        return opening if prompt is None else {**opening, "prompt_token_ids": prompt}

    def part(
        self, index: int, text: str, tokens: Sequence[int] | None, reason: str | None
    ) -> dict[str, Any]:
        delta = {"content": text} if text else {}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        return choice if tokens is None else {**choice, "token_ids": tokens}

    def whole(
        self, index: int, text: str, tokens: Sequence[int] | None, reason: str
    ) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": index, "message": message, "logprobs": None, "finish_reason": reason}
        return choice if tokens is None else {**choice, "token_ids": tokens}

    def add_prompts(self, body: dict[str, Any], prompts: Sequence[Sequence[int]]) -> None:
        body["prompt_token_ids"] = prompts[0]


def routes(door: FrontDoor) -> list[web.RouteDef]:
    """The route, bound to ``door``."""
    shape = ChatShape()

    async def chat(request: web.Request) -> web.StreamResponse:
        body = await read_body(request)
        check_model(body, door.settings.model)
        return await reply(door, request, parse_chat(body, door.settings), shape)

    return [web.post("/v1/chat/completions", chat)]
