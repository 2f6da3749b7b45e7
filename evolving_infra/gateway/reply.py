"""Runs a generation request on the cluster and answers it, whole or as a stream."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from aiohttp import web

from evolving_infra.errors import EvolvingInfraError
from evolving_infra.gateway import sse
from evolving_infra.gateway.answer import Answer, Shape
from evolving_infra.gateway.door import FrontDoor
from evolving_infra.gateway.failures import as_failure, error_body
from evolving_infra.gateway.generation import Ended, Piece, generate, interleave
from evolving_infra.gateway.requests import GenerationRequest
from evolving_infra.gateway.submissions import submissions

Items = AsyncGenerator[tuple[int, Piece | Ended], None]


async def reply(
    door: FrontDoor, request: web.Request, asked: GenerationRequest, shape: Shape
) -> web.StreamResponse:
    """Answer ``asked`` in ``shape``. When the client goes away, the cluster's requests are aborted.

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
    answer = Answer(asked, shape, head)
    headers = {"X-Request-Id": request_id}
    async with aclosing(_measured(door, started, interleave(outputs))) as items:
        if asked.stream:
            return await _stream(door, request, answer, items, headers)
        async for index, item in items:
            answer.add(index, item)
    return web.json_response(answer.whole(), headers=headers, dumps=sse.to_json)


async def _stream(
    door: FrontDoor, request: web.Request, answer: Answer, items: Items, headers: dict[str, str]
) -> web.StreamResponse:
    # Nothing is sent before the first item, so a request that can't run gets a proper status.
    first = await anext(items)
    response = await sse.open_stream(request, headers)
    await _write(response, answer.chunk(*first))
    try:
        async for index, item in items:
            await _write(response, answer.chunk(index, item))
        await response.write(answer.tail())
    except EvolvingInfraError as error:
        door.metrics.stream_errors.inc()
        failure = as_failure(error, door.settings.retry_after_s)
        await response.write(sse.event(error_body(failure)))
    await response.write_eof()
    return response


async def _write(response: web.StreamResponse, data: bytes) -> None:
    """Waits while the client reads too slowly. The cluster does not: it goes on computing."""
    if data:
        await response.write(data)


async def _measured(door: FrontDoor, started: float, items: Items) -> Items:
    """The same items; the first piece and the ends go into the metrics."""
    is_first = True
    async with aclosing(items):
        async for index, item in items:
            if is_first:
                door.metrics.ttft.observe(door.clock() - started)
                is_first = False
            if isinstance(item, Ended):
                door.metrics.add_output(item)
            yield index, item
    door.metrics.e2e.observe(door.clock() - started)
