"""Exactness: sampled requests, computed again on a fresh engine, must give the same tokens."""

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from evolving_infra.errors import PeerError
from evolving_infra.replay.outcome import Outcome


@dataclass(frozen=True, kw_only=True)
class Exactness:
    """How many requests were computed again, and the names of those whose tokens differ."""

    checked: int
    inexact: tuple[str, ...]


def choose(outcomes: Sequence[Outcome], count: int, seed: int) -> tuple[Outcome, ...]:
    """``count`` finished requests at random; those that reused KV come first."""
    finished = sorted(
        (outcome for outcome in outcomes if not outcome.failed and outcome.output),
        key=lambda outcome: outcome.request,
    )
    random.Random(seed).shuffle(finished)
    finished.sort(key=lambda outcome: outcome.cached_tokens == 0)
    return tuple(finished[:count])


async def check_exact(samples: Sequence[Outcome], command: Sequence[str]) -> Exactness:
    """Compute ``samples`` again with ``command`` and compare.

    The command reads JSON lines ``{"tokens", "sampling"}`` and answers each with ``{"tokens"}``.

    Raises:
        PeerError: It failed, or did not answer every line.
    """
    if not samples:
        return Exactness(checked=0, inexact=())
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await process.communicate("".join(map(_question, samples)).encode())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    answers = out.decode().splitlines()
    if process.returncode or len(answers) != len(samples):
        last = err.decode(errors="replace").strip().rpartition("\n")[2]
        raise PeerError(
            f"the exactness check ended with code {process.returncode} after {len(answers)} of "
            f"{len(samples)} requests: {last or 'no error text'}"
        )
    differ = [
        sample.request
        for sample, answer in zip(samples, answers, strict=True)
        if tuple(json.loads(answer)["tokens"]) != sample.output
    ]
    return Exactness(checked=len(samples), inexact=tuple(differ))


def _question(sample: Outcome) -> str:
    return json.dumps({"tokens": sample.prompt, "sampling": asdict(sample.sampling)}) + "\n"
