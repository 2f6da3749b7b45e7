"""Answers a generation request, whole or as a stream; the routes differ only in their shape."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import asdict
from typing import Any, Protocol, Union

from aiohttp import web

from evolving_infra.cluster.client import Submission
from evolving_infra.errors import EvolvingInfraError, InputError
from evolving_infra.gateway import sse
from evolving_infra.gateway.door import FrontDoor
from evolving_infra.gateway.failures import as_failure, error_body
from evolving_infra.gateway.generation import Ended, Piece, generate, interleave
from evolving_infra.gateway.requests import GenerationRequest
from evolving_infra.gateway.submissions import submissions

Tokens = Sequence[int]
Items = AsyncGenerator[tuple[int, Union[Piece, Ended]], None]


class Shape(Protocol):
    """How one route writes its choices. ``tokens`` and ``prompt`` are None unless asked for."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def opening(self, index: int, prompt: Tokens | None) -> dict[str, Any] | None:
        """Fields of the chunk that precedes the first text of a choice, if there is one."""

    def part(
        self, index: int, text: str, tokens: Tokens | None, reason: str | None
    ) -> dict[str, Any]:
        """One choice of a chunk."""

    def whole(self, index: int, text: str, tokens: Tokens | None, reason: str) -> dict[str, Any]:
        """One choice of a whole answer."""

    def prompts(self, body: dict[str, Any], prompts: Sequence[Tokens]) -> None:
        """Add the prompts' token ids to a whole answer."""


async def reply(
    door: FrontDoor, request: web.Request, asked: GenerationRequest, shape: Shape
) -> web.StreamResponse:
    """Run ``asked`` on the cluster and answer in ``shape``.

    Raises:
        EvolvingInfraError: nothing was sent yet. Later errors go into the stream.
    """
    started = door.clock()
    request_id = f"{shape.id_prefix}-{door.new_id()}"
    outputs = [
        generate(door.cluster, submission, asked.stops)
        for submission in submissions(asked, request_id, request.headers)
    ]
    head = {
        "id": request_id,
        "object": shape.chunk_object if asked.stream else shape.whole_object,
        "created": int(door.unix_time()),
        "model": door.settings.model,
    }
    async with aclosing(_measured(interleave(outputs), door, started)) as items:
        if asked.stream:
            return await _stream(door, request, Writer(asked, shape, head), items)
        return await _whole(Writer(asked, shape, head), items)
