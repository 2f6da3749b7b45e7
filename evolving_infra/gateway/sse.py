"""Server-sent events: one JSON object per event, ``[DONE]`` at the end."""

import json
from collections.abc import Mapping

from aiohttp import web

DONE = b"data: [DONE]\n\n"

to_json = json.JSONEncoder(separators=(",", ":")).encode
"""Compact JSON in ASCII. Built once: ``json.dumps`` with separators builds an encoder a call."""


def event(body: Mapping[str, object]) -> bytes:
    """One event."""
    return f"data: {to_json(body)}\n\n".encode()


async def open_stream(request: web.Request, headers: Mapping[str, str]) -> web.StreamResponse:
    """Send status 200 and the headers of an event stream."""
    response = web.StreamResponse(
        headers={
            "Content-Type": "text/event-stream; charset=utf-8",
            "Cache-Control": "no-cache",
            # Buffering proxies would turn a stream into one late answer.
            "X-Accel-Buffering": "no",
            **headers,
        }
    )
    await response.prepare(request)
    return response
