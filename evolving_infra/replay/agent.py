"""One recorded agent at work: its requests, each when the trace allows, and its branch ends."""

import asyncio
import re
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from evolving_infra.replay.client import GatewayClient
from evolving_infra.replay.clock import Clock
from evolving_infra.replay.ideal import IdealCache
from evolving_infra.replay.outcome import Outcome, Tokens
from evolving_infra.replay.progress import Progress
from evolving_infra.replay.wire import CompletionCall, RequestError
from evolving_infra.traces.prompts import PromptBuilder
from evolving_infra.traces.workload import BranchEnd, TraceRequest, Trigger, Workload
from evolving_infra.types import SamplingParams

NAME_CHARACTERS = 80
"""Characters of a trace's or branch's own name that go into a branch id; an id has at most 256."""


@dataclass(kw_only=True)
class Replaying:
    """What all agents of a replay share. ``outcomes`` and ``problems`` grow.

    ``salt`` goes into the made-up tokens of every prompt: replays of other salts share none.
    """

    client: GatewayClient
    clock: Clock
    ideal: IdealCache
    progress: Progress
    temperature: float
    seed: int
    salt: str = ""
    outcomes: list[Outcome] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class Agent:
    """Replays one scaled workload. ``name`` is unique in the cluster, ``lap`` changes tokens."""

    def __init__(self, name: str, workload: Workload, lap: int, replaying: Replaying) -> None:
        self._name = name
        self._workload = workload
        self._replaying = replaying
        self._prompts = PromptBuilder(workload, lap, replaying.salt)
        self._branches = _branch_ids(name, workload)
        self._served: set[str] = set()

    async def run(self) -> None:
        """Send every request and end every branch. Failures are recorded, never raised."""
        loop = asyncio.get_running_loop()
        self._start = self._replaying.clock.now()
        self._moments: dict[tuple[Trigger, str], asyncio.Future[float]] = {
            (trigger, request.request): loop.create_future()
            for request in self._workload.requests
            for trigger in Trigger
        }
        await _together(
            *(self._request(request) for request in self._workload.requests),
            *(self._end(end) for end in self._workload.ends()),
        )

    async def _request(self, request: TraceRequest) -> None:
        clock, progress = self._replaying.clock, self._replaying.progress
        ready = self._start + request.not_before
        for needed in request.dependencies:
            moment = await self._moments[needed.trigger, needed.request]
            ready = max(ready, moment + needed.delay)
        await clock.sleep_until(ready)
        prompt = self._prompts.prompt(request.request)
        progress.sent()
        outcome = await self._outcome(request, prompt)
        if not outcome.failed:
            self._served.add(request.branch)
            self._prompts.answered(request.request, outcome.output)
            self._replaying.ideal.produced(prompt + outcome.output[:-1])
        progress.finished(outcome)
        self._replaying.outcomes.append(outcome)
        self._happened(Trigger.DISPATCH, request)
        self._happened(Trigger.COMPLETION, request)

    async def _outcome(self, request: TraceRequest, prompt: Tokens) -> Outcome:
        """Send one request and measure it from outside."""
        call = self._call(request, prompt)
        ideal = self._replaying.ideal
        ideal_tokens = ideal.reusable(prompt)
        clock = self._replaying.clock
        sent = first = clock.now()

        def on_first() -> None:
            nonlocal first
            first = clock.now()
            ideal.produced(prompt)

        name = f"{self._name}/{request.request}"
        try:
            answer = await self._replaying.client.complete(
                call, lambda: self._happened(Trigger.DISPATCH, request), on_first
            )
        except RequestError as failure:
            return Outcome(
                request=name,
                prompt=prompt,
                output=(),
                sampling=call.sampling,
                ideal_tokens=ideal_tokens,
                status=failure.status,
                error=str(failure),
            )
        return Outcome(
            request=name,
            prompt=prompt,
            output=answer.tokens,
            sampling=call.sampling,
            ideal_tokens=ideal_tokens,
            cached_tokens=answer.cached_tokens,
            ttft=first - sent,
            e2e=clock.now() - sent,
            timings=answer.timings,
        )

    def _call(self, request: TraceRequest, prompt: Tokens) -> CompletionCall:
        parent = request.parent_branch
        return CompletionCall(
            branch=self._branches[request.branch],
            version=request.version,
            kind=request.kind,
            parent=None if parent is None else self._branches[parent],
            prompt=prompt,
            sampling=SamplingParams(
                max_tokens=request.output_tokens,
                temperature=self._replaying.temperature,
                seed=self._replaying.seed,
                ignore_eos=True,
            ),
        )

    async def _end(self, end: BranchEnd) -> None:
        for request in end.after:
            await self._moments[Trigger.COMPLETION, request]
        if end.branch not in self._served:
            return
        branch = self._branches[end.branch]
        try:
            await self._replaying.client.end_branch(branch)
        except RequestError as failure:
            self._replaying.problems.append(f"end of {branch}: {failure.status} {failure}")

    def _happened(self, trigger: Trigger, request: TraceRequest) -> None:
        moment = self._moments[trigger, request.request]
        if not moment.done():
            moment.set_result(self._replaying.clock.now())


def _branch_ids(name: str, workload: Workload) -> dict[str, str]:
    """Ids for the gateway: a number that keeps them unique, then the branch's name made legal."""
    names = dict.fromkeys(request.branch for request in workload.requests)
    return {branch: f"{name}:{index}-{legal(branch)}" for index, branch in enumerate(names)}


def legal(name: str) -> str:
    """``name`` with only the characters that every gateway accepts in a branch id."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", name)[:NAME_CHARACTERS]


async def _together(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run all; if one fails or the caller is cancelled, none goes on."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
