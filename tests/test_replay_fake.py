"""A gateway that speaks the replay's contract, with a perfect cache and made-up tokens."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web
from aiohttp.test_utils import TestServer

from evolving_infra.config import ClusterConfig
from evolving_infra.replay.ideal import IdealCache

PAGE = 16


@dataclass
class FakeGateway:
    """Logs what it is asked. ``hold`` may delay an answer, ``fail`` may break it.

    ``log`` has ``start NAME``, ``done NAME`` and ``end BRANCH``; a name is the branch (without what
    makes it unique) and a count.
    """

    hold: Callable[[str], Awaitable[None]] | None = None
    fail: dict[str, str] = field(default_factory=dict)
    cache: IdealCache | None = field(default_factory=lambda: IdealCache(PAGE))
    log: list[str] = field(default_factory=list)
    requests: dict[str, dict] = field(default_factory=dict)
    headers: dict[str, dict[str, str]] = field(default_factory=dict)
    answers: dict[str, list[int]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    role_changes: list[dict] = field(default_factory=list)
    served: int = 0
    timings: dict = field(default_factory=dict)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        app = web.Application(client_max_size=1 << 24)
        app.add_routes(
            [
                web.post("/v1/completions", self.complete),
                web.post("/v1/branches/{branch:.+}/end", self.end),
                web.post("/v1/cluster/nodes/{node}/role", self.role),
                web.get("/v1/cluster/state", self.state),
            ]
        )
        async with TestServer(app) as server:
            yield str(server.make_url("")).rstrip("/")

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        name = self._name(request.headers["X-Branch-Id"])
        self.log.append(f"start {name}")
        self.requests[name], self.headers[name] = body, dict(request.headers)
        if self.hold is not None:
            await self.hold(name)
        way = self.fail.get(name)
        if way == "refuse":
            error = {"error": {"message": "prompt: expected less, got more", "param": "prompt"}}
            return web.json_response(error, status=400)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        prompt = body["prompt"]
        choice = {"index": 0, "text": "", "finish_reason": None}
        await self._send(response, {"choices": [{**choice, "prompt_token_ids": prompt}]})
        if way == "drop":
            assert request.transport is not None
            request.transport.close()
            return response
        if way == "error":
            await self._send(response, {"error": {"message": "the engine died"}})
            return response
        output = [(len(prompt) + step) % 7 + 300 for step in range(body["max_tokens"])]
        for token in output:
            await self._send(response, {"choices": [{**choice, "token_ids": [token]}]})
        cached = 0
        if self.cache is not None:
            cached = self.cache.reusable(prompt)
            self.cache.produced(prompt + output[:-1])
        self.served += len(output)
        self.answers[name] = output
        if way == "cut":
            return response
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(output)}
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
        self.log.append(f"done {name}")
        await self._send(response, {"choices": [], "usage": usage, "timings": self.timings})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def end(self, request: web.Request) -> web.Response:
        branch = request.match_info["branch"].partition("-")[2]
        self.log.append(f"end {branch}")
        if self.fail.get(f"end {branch}"):
            return web.json_response({"error": {"message": "already ended"}}, status=409)
        return web.json_response({"id": branch, "ended": True})

    async def role(self, request: web.Request) -> web.Response:
        node, body = request.match_info["node"], await request.json()
        if node != "node1":
            return web.json_response({"error": {"message": "no such node"}}, status=404)
        change = {"node": node, "from": "prefill", "to": body["role"], "control_s": 0.001}
        change |= {"drain_s": 0.5, "blocks_lost": 0, "failed_requests": 0, "moved_requests": 2}
        self.role_changes.append(change)
        return web.json_response(change)

    async def state(self, _: web.Request) -> web.Response:
        node = {"name": "node1", "role": "prefill", "up": True, "prefill_tokens": 5, "pid": 1}
        node |= {"decode_tokens": 100 + self.served, "fetched_blocks": 0, "evicted_blocks": 0}
        state = {"model": "tiny", "page_size": PAGE}
        state |= {"prefetch": {"count": 0, "seconds": 0.0, "blocks": 0}, "nodes": [node]}
        config = json.loads(ClusterConfig().to_json())
        return web.json_response({**state, "config": config, "role_changes": self.role_changes})

    def _name(self, branch: str) -> str:
        short = branch.partition("-")[2]
        count = self.counts[branch] = self.counts.get(branch, -1) + 1
        return f"{short} {count}"

    async def _send(self, response: web.StreamResponse, event: dict) -> None:
        await response.write(f"data: {json.dumps(event)}\n\n".encode())


class Meeting:
    """Holds requests until all of ``names`` have come: they must be in flight together."""

    def __init__(self, *names: str) -> None:
        self._missing = set(names)
        self._names = set(names)
        self._all = asyncio.Event()

    async def __call__(self, name: str) -> None:
        if name not in self._names:
            return
        self._missing.discard(name)
        if not self._missing:
            self._all.set()
        await asyncio.wait_for(self._all.wait(), 30)
