"""How errors look on the wire: OpenAI's error body, and which error has which status.

InputError              400, ``param`` names the field (404 where the path names the thing)
StateError              409
CapacityError           503 with Retry-After: nothing can take the request now
PeerError               502
other EvolvingInfraError 500
"""

import re
from collections.abc import Mapping

from aiohttp import web

from evolving_infra.errors import (
    CapacityError,
    EvolvingInfraError,
    InputError,
    PeerError,
    StateError,
)
from evolving_infra.gateway.sse import to_json

FIELD = re.compile(r"([A-Za-z_][\w.\-\[\]]*): ")
"""The field that ``errors.wrong`` puts first."""


class HttpError(EvolvingInfraError):
    """An answer that is not 2xx, decided by the gateway itself."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})


class ContextLengthError(InputError):
    """Prompt and asked output don't fit the model's context."""


def as_failure(error: EvolvingInfraError, retry_after_s: int) -> HttpError:
    """The answer to ``error``, by its class."""
    text = str(error)
    if isinstance(error, HttpError):
        return error
    if isinstance(error, InputError):
        match = FIELD.match(text)
        code = "context_length_exceeded" if isinstance(error, ContextLengthError) else None
        return HttpError(400, text, param=match.group(1) if match else None, code=code)
    if isinstance(error, CapacityError):
        wait = {"Retry-After": str(retry_after_s)}
        return HttpError(503, text, code="unavailable", headers=wait)
    if isinstance(error, StateError):
        return HttpError(409, text, code="conflict")
    if isinstance(error, PeerError):
        return HttpError(502, text, code="cluster_failed")
    return HttpError(500, text, code="internal_error")


def error_body(failure: HttpError) -> dict[str, object]:
    """OpenAI's form: message, type, param, code."""
    kind = "server_error" if failure.status >= 500 else "invalid_request_error"
    error = {"message": str(failure), "type": kind, "param": failure.param, "code": failure.code}
    return {"error": error}


def failure_response(failure: HttpError) -> web.Response:
    """``failure`` as an HTTP answer with a JSON body."""
    return web.Response(
        status=failure.status,
        text=to_json(error_body(failure)),
        content_type="application/json",
        headers=failure.headers,
    )


def from_aiohttp(error: web.HTTPException, request: web.Request) -> HttpError:
    """The same answer as ``error``, but in OpenAI's form."""
    if error.status == 413:
        return HttpError(413, f"body: {error.text}", param="body")
    headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
    text = f"{request.method} {request.path}: {error.reason}"
    return HttpError(error.status, text, headers=headers)
