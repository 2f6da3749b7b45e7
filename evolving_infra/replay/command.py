"""``evolving-infra replay``: load and scale traces, start a cluster for them, replay, report."""

import argparse
import asyncio
import contextlib
import json
import shlex
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from rich.console import Console

from evolving_infra.cluster.launcher import running_cluster
from evolving_infra.config import ClusterConfig
from evolving_infra.errors import wrong
from evolving_infra.replay.client import GatewayClient
from evolving_infra.replay.console import print_report
from evolving_infra.replay.report import ReplayReport
from evolving_infra.replay.roles import parse_role_change
from evolving_infra.replay.run import ReplayOptions, context_tokens, run_replay
from evolving_infra.traces.load import load
from evolving_infra.traces.scale import parse_scale, scale
from evolving_infra.traces.workload import Workload

STATE_S = 30.0

ConfigFor = Callable[[int], ClusterConfig]
"""The cluster that the flags describe, if a context must hold this many tokens."""


def replay(options: argparse.Namespace, config_for: ConfigFor) -> int:
    """Run it. Exit code 0 only if no request failed and every checked token was exact."""
    console = Console()
    workloads = _workloads(options)
    changes = tuple(parse_role_change(text) for text in options.role_change or ())
    if options.json is not None and not options.json.resolve().parent.is_dir():
        raise wrong("json", "a file in a folder that exists", str(options.json))

    async def run() -> ReplayReport:
        async with _cluster(options, config_for, workloads, console) as (url, config):
            for change in changes:
                if change.node not in config.roles:
                    raise wrong("role-change", f"a node of {', '.join(config.roles)}", change.node)
            wanted = ReplayOptions(
                workloads=workloads,
                cluster=config,
                run=uuid.uuid4().hex[:8],
                concurrency=options.concurrency,
                temperature=options.temperature,
                seed=options.seed,
                check_exact=options.check_exact,
                role_changes=changes,
                command=shlex.join(["evolving-infra", *sys.argv[1:]]),
            )
            return await run_replay(wanted, url, console)

    report = asyncio.run(run())
    print_report(report, console)
    if options.json is not None:
        options.json.write_text(json.dumps(report.to_json(), indent=2) + "\n")
    return 0 if report.ok else 1


def _workloads(options: argparse.Namespace) -> tuple[Workload, ...]:
    tokens, time = parse_scale(options.token_scale), parse_scale(options.time_scale)
    return tuple(scale(load(path), tokens, time, options.max_wait) for path in options.traces)


@contextlib.asynccontextmanager
async def _cluster(
    options: argparse.Namespace,
    config_for: ConfigFor,
    workloads: tuple[Workload, ...],
    console: Console,
) -> AsyncIterator[tuple[str, ClusterConfig]]:
    """URL and configuration of the cluster to use: the running one of ``--url``, or a new one."""
    if options.url is not None:
        async with GatewayClient(options.url, STATE_S) as client:
            state = await client.state()
        yield options.url, ClusterConfig.from_json(json.dumps(state["config"]))
        return
    config = config_for(context_tokens(workloads))
    console.print(
        f"starting {config.split}: {config.engine.model}, {config.engine.tp_size} ranks a node, "
        f"blocks of {config.engine.page_size} tokens ..."
    )
    run_dir: Path | None = options.run_dir
    async with running_cluster(config, run_dir) as launcher:
        yield launcher.url, config
