"""``evolving-infra replay``: load and scale traces, start a cluster for them, replay, report."""

import argparse
import contextlib
import json
import os
import shlex
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from rich.console import Console

from evolving_infra.cluster.interrupt import run_interruptibly
from evolving_infra.cluster.launcher import running_cluster
from evolving_infra.config import ClusterConfig
from evolving_infra.errors import InputError, wrong
from evolving_infra.replay.client import GatewayClient
from evolving_infra.replay.console import print_report
from evolving_infra.replay.report import ReplayReport
from evolving_infra.replay.roles import PlannedRoleChange, parse_role_change
from evolving_infra.replay.run import ReplayOptions, context_tokens, run_replay
from evolving_infra.traces.load import load
from evolving_infra.traces.scale import parse_scale, scale
from evolving_infra.traces.workload import Workload

STATE_S = 30.0

ConfigFor = Callable[[int], ClusterConfig]
"""The cluster that the flags describe, if a context must hold this many tokens."""


def replay(options: argparse.Namespace, config_for: ConfigFor) -> int:
    """Run it. Exit code 0 only if no request failed and every checked token was exact.

    Everything that can be wrong with the flags is refused before a cluster is started.
    """
    console = Console()
    workloads = _workloads(options)
    changes = tuple(parse_role_change(text) for text in options.role_change or ())
    if options.json is not None:
        _check_target(options.json)

    async def run() -> ReplayReport:
        config = await _config(options, config_for, workloads)
        wanted = _wanted(options, workloads, changes, config)
        async with _cluster(options, config, console) as url:
            return await run_replay(wanted, url, console)

    report = run_interruptibly(run())
    print_report(report, console)
    if options.json is not None:
        _write(options.json, report)
    return 0 if report.ok else 1


def _wanted(
    options: argparse.Namespace,
    workloads: tuple[Workload, ...],
    changes: tuple[PlannedRoleChange, ...],
    config: ClusterConfig,
) -> ReplayOptions:
    """The checked options. ``InputError`` if one is wrong for this cluster.

    On a running cluster the run's id salts the tokens: what an earlier replay of the same traces
    left there is not reused. On a new cluster tokens depend on the traces only, so that a replay
    can be repeated.
    """
    for change in changes:
        if change.node not in config.roles:
            raise wrong("role-change", f"a node of {', '.join(config.roles)}", change.node)
    run = uuid.uuid4().hex[:8]
    return ReplayOptions(
        workloads=workloads,
        cluster=config,
        run=run,
        salt="" if options.url is None else run,
        concurrency=options.concurrency,
        temperature=options.temperature,
        seed=options.seed,
        check_exact=options.check_exact,
        role_changes=changes,
        command=shlex.join(["evolving-infra", *sys.argv[1:]]),
    )


def _check_target(path: Path) -> None:
    """``InputError`` if the report can't be written there; the file is not touched."""
    folder = path.resolve().parent
    if path.is_dir() or not folder.is_dir():
        raise wrong("json", "a file in a folder that exists", str(path))
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise wrong("json", "a file that can be written", str(path))


def _write(path: Path, report: ReplayReport) -> None:
    try:
        path.write_text(json.dumps(report.to_json(), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"json: expected a writable file, got {path}: {error.strerror}") from None


def _workloads(options: argparse.Namespace) -> tuple[Workload, ...]:
    tokens, time = parse_scale(options.token_scale), parse_scale(options.time_scale)
    return tuple(scale(load(path), tokens, time, options.max_wait) for path in options.traces)


async def _config(
    options: argparse.Namespace, config_for: ConfigFor, workloads: tuple[Workload, ...]
) -> ClusterConfig:
    """Configuration of the cluster to use: the running one of ``--url``, or a new one."""
    if options.url is None:
        return config_for(context_tokens(workloads))
    async with GatewayClient(options.url, STATE_S) as client:
        state = await client.state()
    try:
        return ClusterConfig.from_json(json.dumps(state["config"]))
    except (KeyError, TypeError, ValueError):
        raise wrong("url", "a gateway of this version", options.url) from None


@contextlib.asynccontextmanager
async def _cluster(
    options: argparse.Namespace, config: ClusterConfig, console: Console
) -> AsyncIterator[str]:
    """URL of the cluster to use; a new one lives as long as the block."""
    if options.url is not None:
        yield options.url
        return
    console.print(
        f"starting {config.split}: {config.engine.model}, {config.engine.tp_size} ranks a node, "
        f"blocks of {config.engine.page_size} tokens ..."
    )
    run_dir: Path | None = options.run_dir
    async with running_cluster(config, run_dir) as launcher:
        yield launcher.url
