"""Real clusters for the tests marked ``cluster``: started by the command a user would type."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# A landing must not depend on luck; on a developer's machine every run looks at new cases. How long
# a case takes says nothing about the code.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("local", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "local")

STOP_S = 20


@dataclass(frozen=True)
class Served:
    """A running ``evolving-infra serve``."""

    url: str
    run_dir: Path
    process: subprocess.Popen[str]

    def get(self, path: str) -> dict[str, Any]:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            result: dict[str, Any] = json.load(answer)
            return result

    def post(self, path: str, body: dict[str, Any], **headers: str) -> dict[str, Any]:
        request = urllib.request.Request(
            self.url + path,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json", **headers},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            result: dict[str, Any] = json.load(answer)
            return result

    def node(self, name: str) -> dict[str, Any]:
        nodes: list[dict[str, Any]] = self.get("/v1/cluster/state")["nodes"]
        return next(node for node in nodes if node["name"] == name)

    def wait_until(self, holds: Callable[[], bool], what: str, seconds: float = 60) -> None:
        """Poll until ``holds()``; fail with ``what`` was awaited."""
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, f"not seen in {seconds} s: {what}"
            time.sleep(0.05)


Serve = Callable[..., AbstractContextManager[Served]]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def group_members(run_dir: Path) -> list[int]:
    """Processes whose command line names this run directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes().split(b"\0")
                if str(run_dir).encode() in command and int(entry.name) != os.getpid():
                    found.append(int(entry.name))
    return found


@pytest.fixture
def serve(tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """``with serve("--split", "1P2D") as cluster``: stopped at the end, nothing may be left."""

    @contextlib.contextmanager
    def start(*flags: str, **environment: str) -> Iterator[Served]:
        run_dir = tmp_path_factory.mktemp("run")
        port = free_port()
        command = [sys.executable, "-m", "evolving_infra.cli", "serve", *flags]
        command += ["--port", str(port), "--run-dir", str(run_dir)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith("ready:"):
                    break
            else:
                pytest.fail(f"serve ended with code {process.wait(STOP_S)} before it was ready")
            yield Served(f"http://127.0.0.1:{port}", run_dir, process)
        finally:
            process.send_signal(signal.SIGINT)
            output = process.communicate(timeout=STOP_S)[0]
        assert process.returncode == 0, output
        assert group_members(run_dir) == []

    return start
