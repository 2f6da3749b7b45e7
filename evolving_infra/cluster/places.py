"""Where the processes of one cluster meet: a private run directory with sockets, logs, config."""

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

from evolving_infra.config import ClusterConfig
from evolving_infra.errors import wrong

SOCKET_PATH_LIMIT = 100
"""A Unix socket path has at most 107 bytes; a store adds a suffix of its own."""


@dataclass(frozen=True, slots=True)
class Places:
    """Names inside a run directory that only its owner can enter."""

    run_dir: Path

    @staticmethod
    def create(run_dir: Path) -> "Places":
        """Make the directory, mode 0700; one that is there must be the caller's own.

        Raises ``InputError`` if others may write to it, or if its path is too long.
        """
        try:
            run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise wrong("run_dir", "a folder", f"{run_dir} ({error.strerror})") from None
        found = run_dir.stat()
        if found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise wrong("run_dir", "a folder of yours that only you may write to", str(run_dir))
        places = Places(run_dir)
        if len(str(run_dir / "node63.store.sock")) > SOCKET_PATH_LIMIT:
            raise wrong(
                "run_dir", f"a path of at most {SOCKET_PATH_LIMIT - 20} bytes", str(run_dir)
            )
        places.logs.mkdir(exist_ok=True)
        return places

    def lock(self) -> int:
        """Claim the folder for one cluster, until the returned fd is closed or this process ends.

        Raises ``InputError`` if a running cluster has it.
        """
        fd = os.open(self.run_dir / "lock", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            expected = "a folder that no running cluster uses"
            raise wrong("run_dir", expected, str(self.run_dir)) from None
        return fd

    @property
    def config(self) -> Path:
        return self.run_dir / "cluster.json"

    @property
    def logs(self) -> Path:
        return self.run_dir / "logs"

    @property
    def controller(self) -> str:
        return f"unix:{self.run_dir / 'controller.sock'}"

    def store(self, node: str) -> str:
        """Address of a node's store."""
        return f"unix:{self.run_dir / node}.store.sock"

    def read_config(self) -> ClusterConfig:
        return ClusterConfig.from_json(self.config.read_text())
