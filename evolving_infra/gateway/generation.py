"""One output: runs a submission on the cluster and turns its tokens into pieces of text."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from evolving_infra.cluster.client import Cluster, Finish, Submission
from evolving_infra.errors import PeerError
from evolving_infra.gateway.transcript import Transcript
from evolving_infra.types import RequestTimings


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Text that became certain and the tokens that arrived; either may be empty."""

    text: str
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The last item. ``timings`` is None if the gateway ended the output at a stop string."""

    text: str
    reason: str
    prompt_tokens: int
    output_tokens: int
    timings: RequestTimings | None


Output = AsyncGenerator[Piece | Ended, None]


async def generate(cluster: Cluster, submission: Submission, stops: Sequence[str]) -> Output:
    """Run ``submission``; yields pieces, then one ``Ended``. Closing it aborts the request.

    Raises:
        EvolvingInfraError: what ``Cluster.submit`` raises.
        PeerError: the cluster ended without a finish, or lost tokens on the way.
    """
    transcript = Transcript(stops)
    finish: Finish | None = None
    async with aclosing(cluster.submit(submission)) as items:
        async for item in items:
            if isinstance(item, Finish):
                finish = item
                break
            text, tokens = transcript.feed(item.tokens)
            yield Piece(text=text, tokens=tokens)
            if transcript.stopped:
                break
    yield _ended(submission, transcript, finish)


def _ended(submission: Submission, transcript: Transcript, finish: Finish | None) -> Ended:
    name, got = submission.request, transcript.num_tokens
    if not transcript.stopped:
        if finish is None:
            raise PeerError(f"{name}: the cluster ended the request without finishing it")
        if finish.output_tokens != got:
            raise PeerError(f"{name}: expected {finish.output_tokens} output tokens, got {got}")
    return Ended(
        text="" if transcript.stopped else transcript.close(),
        reason="stop" if finish is None or transcript.stopped else finish.reason,
        prompt_tokens=len(submission.tokens),
        output_tokens=got,
        timings=finish.timings if finish is not None else None,
    )


async def interleave(
    outputs: Sequence[Output],
) -> AsyncGenerator[tuple[int, Piece | Ended], None]:
    """Items of all outputs as they come, each with the index of its output.

    At most one item of each output waits here. What a slow reader has not taken yet waits where the
    outputs come from; the cluster goes on (a request's ``max_tokens`` bounds what can wait).
    Closing it closes every output.
    """
    if len(outputs) == 1:
        async with aclosing(outputs[0]) as only:
            async for item in only:
                yield 0, item
        return
    waiting = {asyncio.create_task(_next(output)): i for i, output in enumerate(outputs)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                index = waiting.pop(task)
                got = task.result()
                if got is not None:
                    waiting[asyncio.create_task(_next(outputs[index]))] = index
                    yield index, got
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for output in outputs:
            await output.aclose()


async def _next(output: Output) -> Piece | Ended | None:
    return await anext(output, None)
