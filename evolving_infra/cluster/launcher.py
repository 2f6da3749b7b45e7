"""Starts the processes of a cluster on this machine, restarts those that die, stops them all.

Every child asks the kernel to die with the launcher, so nothing is left behind even by kill -9.
A restarted engine attaches to its node's store again: the host pool and its KV have survived.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

from evolving_infra.cluster.admin import cluster_state
from evolving_infra.cluster.places import Places
from evolving_infra.cluster.process import REFUSED
from evolving_infra.cluster.remote import RemoteCluster
from evolving_infra.config import ClusterConfig
from evolving_infra.errors import EvolvingInfraError, PeerError, wrong

log = logging.getLogger(__name__)

READY_S = 120.0
STOP_S = 5.0
RESTART_PAUSE_S = 0.5
QUICK_DEATHS = 5
QUICK_DEATH_S = 5.0


@dataclass(kw_only=True)
class Child:
    """One process of the cluster. ``quick_deaths`` counts starts that died within 5 s in a row."""

    name: str
    command: tuple[str, ...]
    process: asyncio.subprocess.Process
    started: float
    quick_deaths: int = 0


class Launcher:
    """A running cluster. Use ``running_cluster``."""

    def __init__(self, config: ClusterConfig, places: Places) -> None:
        self.config = replace(config, instance=secrets.token_hex(8))
        self.places = places
        self.secret = secrets.token_hex(32)
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._children: dict[str, Child] = {}
        self._watchers: set[asyncio.Task[None]] = set()
        self._stopping = False

    @property
    def url(self) -> str:
        return f"http://{self.config.host}:{self.config.port}"

    async def start(self) -> None:
        """Start everything. Returns at once; ``wait_ready`` waits.

        Raises ``InputError`` if the gateway's port is taken.
        """
        self._check_port()
        self.places.config.touch(mode=0o600)
        self.places.config.write_text(self.config.to_json())
        for node in self.config.roles:
            await self._spawn(f"{node}.store", "evolving_infra.cluster.store_process", node)
        await self._spawn("controller", "evolving_infra.cluster.controller_process", "")
        for node in self.config.roles:
            await self._spawn(node, "evolving_infra.cluster.engine_process", node)
        await self._spawn("gateway", "evolving_infra.gateway", "")

    async def wait_ready(self) -> None:
        """Wait until every node serves. Raises ``PeerError`` with the reason if that fails."""
        deadline = time.monotonic() + READY_S
        cluster = RemoteCluster(self.places.controller, self.secret)
        try:
            while True:
                if self.failed.done():
                    self.failed.result()
                with contextlib.suppress(PeerError):
                    state = await cluster.state()
                    if state["ready"] and await self._gateway_answers():
                        return
                if time.monotonic() > deadline:
                    raise PeerError(
                        f"the cluster was not ready in {READY_S:.0f} s; see {self.places.logs}"
                    )
                await asyncio.sleep(0.05)
        finally:
            await cluster.close()

    async def stop(self) -> None:
        """Stop every process: first the front door, which lets running requests finish.

        What has not ended 5 s after it was asked to is killed.
        """
        self._stopping = True
        await self._end([c for name, c in self._children.items() if name == "gateway"])
        await self._end(list(self._children.values()))
        for watcher in self._watchers:
            watcher.cancel()
        if self.failed.done():
            self.failed.exception()

    async def _end(self, children: list[Child]) -> None:
        for child in children:
            if child.process.returncode is None:
                child.process.send_signal(signal.SIGTERM)
        waits = [asyncio.create_task(child.process.wait()) for child in children]
        if waits:
            await asyncio.wait(waits, timeout=STOP_S)
        for child, wait in zip(children, waits, strict=True):
            if not wait.done():
                log.warning("%s did not stop in %s s: killed", child.name, STOP_S)
                child.process.kill()
            await wait

    def _check_port(self) -> None:
        host, port = self.config.host, self.config.port
        try:
            socket.create_server((host, port)).close()
        except OSError as error:
            reason = (error.strerror or str(error)).partition(" (while")[0]
            expected = "an address of this machine with a free port"
            raise wrong("host and port", expected, f"{host}:{port} ({reason})") from None

    async def _gateway_answers(self) -> bool:
        """True if what listens on the port is this cluster's gateway."""
        try:
            state = await asyncio.to_thread(cluster_state, self.url)
        except EvolvingInfraError:
            return False
        config = state.get("config")
        return isinstance(config, dict) and config.get("instance") == self.config.instance

    async def _spawn(self, name: str, module: str, node: str) -> None:
        command = (
            *(sys.executable, "-m", module, "--run-dir", str(self.places.run_dir)),
            *(("--name", node) if node else ()),
        )
        child = Child(
            name=name,
            command=command,
            process=await self._run(name, command),
            started=time.monotonic(),
        )
        self._children[name] = child
        watcher = asyncio.create_task(self._watch(child))
        self._watchers.add(watcher)

    async def _run(self, name: str, command: tuple[str, ...]) -> asyncio.subprocess.Process:
        environment = {
            **os.environ,
            "EVOLVING_INFRA_SECRET": self.secret,
            "EVOLVING_INFRA_PARENT": str(os.getpid()),
            "OMP_NUM_THREADS": "1",
        }
        with (self.places.logs / f"{name}.log").open("ab") as output:
            return await asyncio.create_subprocess_exec(
                *command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the launcher, which stops them in order
            )

    async def _watch(self, child: Child) -> None:
        while True:
            code = await child.process.wait()
            if self._stopping:
                return
            lived = time.monotonic() - child.started
            child.quick_deaths = child.quick_deaths + 1 if lived < QUICK_DEATH_S else 0
            if code == REFUSED or child.quick_deaths >= QUICK_DEATHS:
                self._fail(child, code)
                return
            log.warning("%s ended with code %s; restarting it", child.name, code)
            await asyncio.sleep(RESTART_PAUSE_S)
            if self._stopping:
                return
            child.process = await self._run(child.name, child.command)
            child.started = time.monotonic()

    def _fail(self, child: Child, code: int) -> None:
        ended = "can't run" if code == REFUSED else f"keeps ending with code {code}"
        text = f"{child.name} {ended}: {last_line(self.places.logs / f'{child.name}.log')}"
        if not self.failed.done():
            self.failed.set_exception(PeerError(text))


def last_line(path: Path) -> str:
    """The last line a process logged, or a word that it logged none."""
    lines = path.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it logged nothing"


@contextlib.asynccontextmanager
async def running_cluster(
    config: ClusterConfig,
    run_dir: Path | None = None,
) -> AsyncIterator[Launcher]:
    """A ready cluster; stopped at the end of the block, whatever happens.

    Raises ``PeerError`` if it does not become ready. Logs are kept only in a given ``run_dir``.
    """
    with contextlib.ExitStack() as stack:
        if run_dir is None:
            run_dir = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="evolving-infra-"))
            )
        places = Places.create(run_dir)
        stack.callback(os.close, places.lock())
        launcher = Launcher(config, places)
        try:
            await launcher.start()
            await launcher.wait_ready()
            yield launcher
        finally:
            await launcher.stop()
