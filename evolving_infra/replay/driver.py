"""Several agents at once: whole traces run side by side, further ones wait for a place."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence

from evolving_infra.errors import wrong
from evolving_infra.replay.agent import Agent, Replaying, legal
from evolving_infra.traces.workload import Workload


async def drive(
    workloads: Sequence[Workload], replaying: Replaying, *, run: str, concurrency: int | None
) -> None:
    """Replay all scaled workloads, at most ``concurrency`` of them at a time (None: all).

    ``run`` goes into every branch id, so that two replays on one cluster never share a branch.
    A trace that comes twice gets new tokens the second time. What happened is in ``replaying``.
    """
    if concurrency is not None and concurrency < 1:
        raise wrong("concurrency", "a positive number", concurrency)
    places = asyncio.Semaphore(concurrency) if concurrency else contextlib.nullcontext()
    laps: Counter[str] = Counter()
    agents = []
    for index, workload in enumerate(workloads):
        name = f"{run}.{index}.{legal(workload.name)}"
        agents.append(Agent(name, workload, laps[workload.name], replaying))
        laps[workload.name] += 1

    async def in_turn(agent: Agent) -> None:
        async with places:
            await agent.run()

    tasks = [asyncio.create_task(in_turn(agent)) for agent in agents]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
