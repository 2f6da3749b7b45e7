"""The gateway as the replay uses it: streamed completions, branch ends, roles, state."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import aiohttp

from evolving_infra.replay import wire
from evolving_infra.replay.wire import CompletionCall, Json, RequestError
from evolving_infra.types import RequestTimings, Role

Signal = Callable[[], None]

TRANSPORT_ERRORS = (aiohttp.ClientError, asyncio.TimeoutError, OSError)


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A finished answer: its tokens and what the cluster said about it."""

    tokens: tuple[int, ...]
    cached_tokens: int
    timings: RequestTimings


class GatewayClient:
    """One connection pool to a gateway at ``url``. Use as an async context manager.

    ``timeout_s`` bounds each call as a whole. Every method raises ``RequestError``.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        self._url = url.rstrip("/")
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self.model: str | None = None

    async def __aenter__(self) -> "GatewayClient":
        tracing = aiohttp.TraceConfig()
        tracing.on_request_chunk_sent.append(_body_sent)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=self._timeout,
            trace_configs=[tracing],
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def complete(self, call: CompletionCall, on_sent: Signal, on_first: Signal) -> Completion:
        """Stream one completion. ``on_sent``: the body is out; ``on_first``: a token came."""
        tokens: list[int] = []
        last: Json = {}
        async with self._request(
            "POST", "/v1/completions", wire.body(call, self.model), wire.signal(call), on_sent
        ) as response:
            async for event in wire.events(response.status, response.content.iter_any()):
                if "error" in event:
                    raise RequestError(response.status, wire.message(event))
                for choice in event.get("choices", ()):
                    new = choice.get("token_ids") or ()
                    if new and not tokens:
                        on_first()
                    tokens += new
                if event.get("usage"):
                    last = event
        if not last:
            raise RequestError(200, "the stream ended without usage")
        return Completion(
            tokens=tuple(tokens),
            cached_tokens=wire.cached(last["usage"]),
            timings=wire.timings(last),
        )

    async def end_branch(self, branch: str) -> None:
        await self._call("POST", f"/v1/branches/{quote(branch, safe='')}/end")

    async def set_role(self, node: str, role: Role) -> Json:
        path = f"/v1/cluster/nodes/{quote(node, safe='')}/role"
        return await self._call("POST", path, {"role": role.value})

    async def state(self) -> Json:
        """The cluster's state; remembers the model for completions."""
        state = await self._call("GET", "/v1/cluster/state")
        self.model = state.get("model")
        return state

    async def _call(self, method: str, path: str, body: Json | None = None) -> Json:
        async with self._request(method, path, body) as response:
            text = await response.text()
        answer = wire.parsed(text)
        if not isinstance(answer, dict):
            raise RequestError(response.status, f"{path}: expected a JSON object, got {text[:80]}")
        return answer

    def _request(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        headers: dict[str, str] | None = None,
        on_sent: Signal | None = None,
    ) -> "_Answer":
        context = SimpleNamespace(on_sent=on_sent)
        return _Answer(
            self._session.request(
                method,
                f"{self._url}{path}",
                json=body,
                headers=headers,
                trace_request_ctx=context,
            )
        )


class _Answer:
    """A response whose transport and status errors are ``RequestError``."""

    def __init__(self, request: Any) -> None:
        self._request = request

    async def __aenter__(self) -> aiohttp.ClientResponse:
        try:
            response: aiohttp.ClientResponse = await self._request.__aenter__()
            if response.status < 400:
                return response
            text = await response.text(errors="replace")
        except TRANSPORT_ERRORS as error:
            raise RequestError(0, f"no answer: {wire.named(error)}") from None
        raise RequestError(response.status, wire.message(wire.parsed(text), text))

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        await self._request.__aexit__(kind, error, trace)
        if isinstance(error, TRANSPORT_ERRORS):
            raise RequestError(0, f"the answer broke off: {wire.named(error)}") from None


async def _body_sent(_: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
    on_sent = context.trace_request_ctx.on_sent
    if on_sent is not None:
        on_sent()
