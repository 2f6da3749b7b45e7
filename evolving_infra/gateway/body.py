"""Reads the JSON body of a request."""

from aiohttp import web

from evolving_infra.gateway.fields import Body, parse_json


async def read_body(request: web.Request) -> Body:
    """The JSON object a request carries.

    Raises:
        InputError: not a JSON object in UTF-8.
        HTTPRequestEntityTooLarge: beyond the application's limit.
    """
    return parse_json(await request.read())
