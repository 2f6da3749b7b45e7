"""The cluster and the server that the gateway's tests use, and that the cluster echoes."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp

from evolving_infra.cluster.client import Finish, Submission, TokenDelta
from evolving_infra.errors import EvolvingInfraError, InputError, StateError
from evolving_infra.gateway.server import GatewayServer
from evolving_infra.gateway.settings import GatewaySettings
from evolving_infra.gateway.tokenizer import EOS
from evolving_infra.types import BranchKind, RequestTimings, Role, SamplingParams

T = TypeVar("T")
SETTINGS = GatewaySettings(model="echo", max_context_tokens=200, port=0, shutdown_s=5.0)
TIMINGS = RequestTimings(queue=0.5, cached_tokens=3, prefill_node="node0", decode_node="node1")


@dataclass
class EchoCluster:
    """A ``Cluster`` that answers with the prompt, over and over, one token at a time.

    ``steps`` None: as fast as it is read. Else: every token takes one permit of ``steps``.
    """

    steps: asyncio.Semaphore | None = None
    delta_tokens: int = 1
    fail_before: EvolvingInfraError | None = None
    fail_after: tuple[int, Exception] | None = None
    forget_finish: bool = False
    lose_tokens: int = 0
    ready: bool = True
    state_error: EvolvingInfraError | None = None
    submissions: list[Submission] = field(default_factory=list)
    outputs: list[AsyncGenerator[TokenDelta | Finish, None]] = field(default_factory=list)
    started: asyncio.Event = field(default_factory=asyncio.Event)
    running: set[str] = field(default_factory=set)
    aborted: set[str] = field(default_factory=set)
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    produced: int = 0
    branches: dict[str, bool] = field(default_factory=dict)
    roles: dict[str, Role] = field(default_factory=lambda: {"node0": Role.PREFILL})

    def submit(self, submission: Submission) -> AsyncGenerator[TokenDelta | Finish, None]:
        output = self._output(submission)
        # Kept, so that only whoever reads it closes it, not the garbage collector.
        self.outputs.append(output)
        return output

    async def _output(self, submission: Submission) -> AsyncGenerator[TokenDelta | Finish, None]:
        self.submissions.append(submission)
        if self.fail_before is not None:
            raise self.fail_before
        self.running.add(submission.request)
        self.branches.setdefault(submission.branch, True)
        self.started.set()
        self.idle.clear()
        done = False
        try:
            async for delta in self._deltas(submission):
                yield delta
            done = True
        finally:
            self.running.discard(submission.request)
            if not done:
                self.aborted.add(submission.request)
            if not self.running:
                self.idle.set()
        if not self.forget_finish:
            yield self._finish(submission)

    async def end_branch(self, branch: str) -> None:
        if branch not in self.branches:
            raise InputError(f"branch: expected a known branch, got {branch!r}")
        if not self.branches[branch]:
            raise StateError(f"branch {branch} has already ended")
        self.branches[branch] = False

    async def set_role(self, node: str, role: Role) -> dict[str, Any]:
        if node not in self.roles:
            raise InputError(f"node: expected one of {', '.join(self.roles)}, got {node!r}")
        before, self.roles[node] = self.roles[node], role
        return {"node": node, "from": before.value, "to": role.value, "control_s": 0.0}

    async def state(self) -> dict[str, Any]:
        if self.state_error is not None:
            raise self.state_error
        nodes = [
            {"name": name, "role": role.value, "up": True, "queued": 4, "evicted_blocks": 7}
            for name, role in self.roles.items()
        ]
        return {"ready": self.ready, "nodes": nodes}

    async def close(self) -> None:
        pass

    async def _deltas(self, submission: Submission) -> AsyncIterator[TokenDelta]:
        tokens = answer(submission)
        for start in range(0, len(tokens), self.delta_tokens):
            if self.steps is not None:
                await self.steps.acquire()
            if self.fail_after is not None and start >= self.fail_after[0]:
                raise self.fail_after[1]
            self.produced += 1
            yield TokenDelta(tokens=tokens[start : start + self.delta_tokens])

    def _finish(self, submission: Submission) -> Finish:
        tokens = answer(submission)
        full = len(tokens) == submission.sampling.max_tokens
        return Finish(
            reason="length" if full else "stop",
            prompt_tokens=len(submission.tokens),
            output_tokens=len(tokens) + self.lose_tokens,
            timings=TIMINGS,
        )


def answer(submission: Submission) -> tuple[int, ...]:
    """What the echo says: the prompt in a circle, up to the limit or a stop token."""
    sampling = submission.sampling
    stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else {EOS})
    tokens = []
    for i in range(sampling.max_tokens):
        tokens.append(submission.tokens[i % len(submission.tokens)])
        if tokens[-1] in stops:
            break
    return tuple(tokens)


@asynccontextmanager
async def listening(
    cluster: EchoCluster, settings: GatewaySettings = SETTINGS
) -> AsyncIterator[GatewayServer]:
    """A gateway in front of ``cluster``, on a free port."""
    server = GatewayServer(cluster, settings)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@asynccontextmanager
async def serving(
    cluster: EchoCluster, settings: GatewaySettings = SETTINGS
) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of a gateway in front of ``cluster``."""
    async with (
        listening(cluster, settings) as server,
        aiohttp.ClientSession(server.url) as client,
    ):
        yield client


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a test's coroutine; one that hangs fails."""

    async def limited() -> T:
        return await asyncio.wait_for(main, 30)

    return asyncio.run(limited())


def submission_of(tokens: tuple[int, ...], max_tokens: int) -> Submission:
    """A plain submission of ``tokens``."""
    return Submission(
        request="r",
        branch="b",
        version=0,
        kind=BranchKind.ROOT,
        parent=None,
        anonymous=False,
        tokens=tokens,
        sampling=SamplingParams(max_tokens=max_tokens),
    )


def test_the_echo_repeats_the_prompt_until_the_limit() -> None:
    async def main() -> list[TokenDelta | Finish]:
        return [item async for item in EchoCluster().submit(submission_of((1, 2), 3))]

    *deltas, finish = run(main())
    assert deltas == [TokenDelta(tokens=(1,)), TokenDelta(tokens=(2,)), TokenDelta(tokens=(1,))]
    assert isinstance(finish, Finish)
    assert (finish.reason, finish.output_tokens) == ("length", 3)
