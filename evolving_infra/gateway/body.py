"""Reads the JSON body of a request, and only JSON.

A browser lets any page post text or a form to a gateway on the reader's machine; for JSON it asks
the gateway first, which does not agree.
"""

from aiohttp import web

from evolving_infra.errors import InputError
from evolving_infra.gateway.failures import HttpError
from evolving_infra.gateway.fields import Body, parse_json


async def read_body(request: web.Request) -> Body:
    """The JSON object a request carries.

    Raises:
        InputError: not a JSON object in UTF-8.
        HttpError: 415 for a Content-Type other than application/json. None at all is fine, except
            from a page: its requests have an Origin.
        HTTPRequestEntityTooLarge: beyond the application's limit.
    """
    given = request.headers.get("Content-Type")
    if request.content_type != "application/json" and (given or "Origin" in request.headers):
        text = f"Content-Type: expected application/json, got {given!r}"
        raise HttpError(415, text, param="Content-Type")
    try:
        return parse_json(await request.read())
    except web.RequestPayloadError as error:
        raise InputError(f"body: expected it whole and as its headers say, got {error}") from None
