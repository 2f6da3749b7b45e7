"""One replay from start to report, against a gateway that is running."""

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from evolving_infra.config import ClusterConfig
from evolving_infra.errors import PeerError, wrong
from evolving_infra.replay.agent import Replaying
from evolving_infra.replay.client import GatewayClient
from evolving_infra.replay.clock import Clock
from evolving_infra.replay.driver import drive
from evolving_infra.replay.exact import Exactness, check_exact, choose
from evolving_infra.replay.ideal import IdealCache
from evolving_infra.replay.progress import Progress, shown
from evolving_infra.replay.report import Json, Measured, ReplayReport, summarize
from evolving_infra.replay.roles import PlannedRoleChange, RoleChanger
from evolving_infra.traces.workload import Workload

COLD = (sys.executable, "-m", "evolving_infra.cluster.cold")
SEEDS = 1 << 63
"""The gateway takes seeds below this, and the fresh engine must get the one that was used."""
SETTLE_S = 0.2
SETTLE_TRIES = 25
"""After the last request, role changes get 5 s to be seen as drained."""


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """What to replay and how. Workloads are already scaled; all start at once.

    ``run`` makes the branch ids of this replay different from any other's on the same cluster,
    ``salt`` its made-up tokens; without one the same traces have the same tokens in every replay.
    ``cluster`` says how the exactness check's fresh engine is built; it must be the cluster's.

    Raises:
        InputError: A field is out of range, or a request is longer than the cluster's context.
    """

    workloads: tuple[Workload, ...]
    cluster: ClusterConfig
    run: str
    salt: str = ""
    concurrency: int | None = None
    temperature: float = 0.0
    seed: int = 0
    check_exact: int = 0
    role_changes: tuple[PlannedRoleChange, ...] = ()
    command: str = ""
    timeout_s: float = 600.0
    cold: tuple[str, ...] = COLD
    """Command of the exactness check; ``--config FILE`` is added."""

    def __post_init__(self) -> None:
        if not self.workloads:
            raise wrong("workloads", "at least one trace", "none")
        if self.concurrency is not None and self.concurrency < 1:
            raise wrong("concurrency", "a positive number", self.concurrency)
        if self.check_exact < 0:
            raise wrong("check_exact", "a number >= 0", self.check_exact)
        if not 0.0 <= self.temperature <= 2.0:
            raise wrong("temperature", "a number from 0 to 2", self.temperature)
        if not 0 <= self.seed < SEEDS:
            raise wrong("seed", f"an integer from 0 to {SEEDS - 1}", self.seed)
        needed, limit = context_tokens(self.workloads), self.cluster.engine.max_context_tokens
        if needed > limit:
            raise wrong("token scale", f"requests of at most {limit} tokens", f"one of {needed}")


def context_tokens(workloads: Sequence[Workload]) -> int:
    """Tokens of prompt and output of the largest request: the context a cluster must have."""
    requests = [request for workload in workloads for request in workload.requests]
    return max((item.input_tokens + item.output_tokens for item in requests), default=0)


async def run_replay(
    options: ReplayOptions, url: str, console: Console, clock: Clock | None = None
) -> ReplayReport:
    """Replay everything through the gateway at ``url`` and report. Shows progress on ``console``.

    Raises:
        PeerError: The gateway does not answer.
    """
    clock = clock or Clock()
    total = sum(len(workload.requests) for workload in options.workloads)
    async with GatewayClient(url, options.timeout_s) as client:
        before = await client.state()
        progress = Progress(total)
        progress.saw(before)
        replaying = Replaying(
            client=client,
            clock=clock,
            ideal=IdealCache(before["page_size"]),
            progress=progress,
            temperature=options.temperature,
            seed=options.seed,
            salt=options.salt,
        )
        start = clock.now()
        async with shown(progress, client, clock, console):
            await _drive(options, replaying)
        seconds = clock.now() - start
        after = await _settled(client, clock)
    exact = await _exact(options, replaying, console)
    measured = Measured(
        outcomes=tuple(replaying.outcomes),
        before=before,
        after=after,
        exact=exact,
        seconds=seconds,
        problems=tuple(replaying.problems),
    )
    return summarize(measured, seed=options.seed, command=options.command)


async def _drive(options: ReplayOptions, replaying: Replaying) -> None:
    """All agents, and beside them the role changes."""
    changer = RoleChanger(options.role_changes, replaying.client, replaying.clock)
    changing = asyncio.create_task(changer.run())
    try:
        await drive(options.workloads, replaying, run=options.run, concurrency=options.concurrency)
    finally:
        await changer.stop(changing)
    replaying.problems += changer.problems


async def _settled(client: GatewayClient, clock: Clock) -> Json:
    """The cluster's state once every role change has drained, or after a while."""
    for _ in range(SETTLE_TRIES):
        state = await client.state()
        if all(change["drain_s"] is not None for change in state.get("role_changes", ())):
            break
        await clock.sleep_until(clock.now() + SETTLE_S)
    return state


async def _exact(options: ReplayOptions, replaying: Replaying, console: Console) -> Exactness:
    """Recompute samples. A check that cannot run is a problem of the replay, not its end."""
    samples = choose(replaying.outcomes, options.check_exact, options.seed)
    if samples:
        console.print(f"recomputing {len(samples)} requests on a fresh engine ...")
    with tempfile.TemporaryDirectory(prefix="evolving-infra-") as folder:
        config = Path(folder) / "cluster.json"
        config.write_text(options.cluster.to_json())
        try:
            return await check_exact(samples, (*options.cold, "--config", str(config)))
        except PeerError as error:
            replaying.problems.append(str(error))
            return Exactness(checked=0, inexact=())
