"""An agent waits long for a tool while others fill a small host pool: what is left when it resumes?

One prefill and one decode node, a host pool of 160 blocks of 16 tokens per node, a device pool that
holds little more than one context. In this order:

    paused      sends 640 tokens (40 blocks), then waits for its tool
    compacted   sends 640 tokens, then rewrites its context: 320 tokens, 64 of them as before
    others      eight unrelated one-shot requests of 480 tokens (240 blocks)
    paused      resumes with 16 more tokens; compacted resumes; its old context is asked for again

Run once with eviction by active branches (``counted``) and once with plain LRU. What counts is
how many prompt tokens did not have to be recomputed.
"""

import asyncio
import random
from dataclasses import dataclass
from typing import Any

import aiohttp

from benchmarks.rows import Row
from evolving_infra.cli import free_port
from evolving_infra.cluster.launcher import running_cluster
from evolving_infra.config import ClusterConfig, EngineConfig, StoreConfig

PAGE = 16
HOST_BLOCKS = 160


@dataclass(frozen=True, slots=True)
class Outcome:
    """Cached tokens of the three last requests, and how many could have been."""

    paused: int
    compacted: int
    superseded: int


def config(eviction: str) -> ClusterConfig:
    engine = EngineConfig(page_size=PAGE, tp_size=1, device_pages=48, max_context_tokens=768)
    store = StoreConfig(blocks=HOST_BLOCKS, eviction=eviction)
    return ClusterConfig(split="1P1D", port=free_port("127.0.0.1"), engine=engine, store=store)


def context(name: str, tokens: int) -> list[int]:
    """Random tokens of their own for every name."""
    return random.Random(name).choices(range(256), k=tokens)


async def ask(
    session: aiohttp.ClientSession, prompt: list[int], branch: str = "", version: int = 0
) -> int:
    """Send one request; its cached tokens."""
    headers = {"X-Branch-Id": branch, "X-Context-Version": str(version)} if branch else {}
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    async with session.post("/v1/completions", json=body, headers=headers) as answer:
        answer.raise_for_status()
        usage: dict[str, Any] = (await answer.json())["usage"]
        cached: int = usage["prompt_tokens_details"]["cached_tokens"]
        return cached


async def play(eviction: str) -> Outcome:
    """The whole story on a cluster of its own."""
    async with (
        running_cluster(config(eviction)) as cluster,
        aiohttp.ClientSession(cluster.url) as session,
    ):
        paused, old = context("paused", 640), context("compacted", 640)
        new = old[:64] + context("summary", 256)
        await ask(session, paused, "paused")
        await ask(session, old, "compacted")
        await ask(session, new, "compacted", 1)
        for i in range(8):
            await ask(session, context(f"other{i}", 480))
        return Outcome(
            paused=await ask(session, paused + context("tool result", 16), "paused"),
            compacted=await ask(session, new + context("next", 16), "compacted", 1),
            superseded=await ask(session, old + context("again", 16)),
        )


def run() -> list[Row]:
    """Both policies in one run."""
    counted, lru = (asyncio.run(play(policy)) for policy in ("counted", "lru"))
    rows = []
    for case, possible in (("paused", 640), ("compacted", 320), ("superseded", 640)):
        ours, theirs = getattr(counted, case), getattr(lru, case)
        metric = f"tokens reused of {possible}"
        common = {"bench": "eviction", "case": case, "metric": metric, "unit": "tokens"}
        ratio = ours / theirs if theirs else None
        rows.append(Row(subject="counted", value=ours, peer="lru", ratio=ratio, **common))
        rows.append(Row(subject="lru", value=theirs, **common))
    return rows
