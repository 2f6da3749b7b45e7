"""``evolving-infra serve``: a cluster for a person's own client, until Ctrl-C."""

from pathlib import Path

from evolving_infra.cluster.interrupt import run_interruptibly
from evolving_infra.cluster.launcher import Launcher, running_cluster
from evolving_infra.config import ClusterConfig


def serve(config: ClusterConfig, run_dir: Path | None) -> int:
    """Run until a signal. ``PeerError`` if the cluster can't start or a process keeps dying."""
    try:
        run_interruptibly(_run(config, run_dir))
    except KeyboardInterrupt:
        print("stopped")
    return 0


async def _run(config: ClusterConfig, run_dir: Path | None) -> None:
    engine = config.engine
    print(f"starting {config.split}: {engine.model}, {engine.tp_size} ranks a node ...", flush=True)
    async with running_cluster(config, run_dir) as launcher:
        print(_hints(launcher), flush=True)
        await launcher.failed


def _hints(launcher: Launcher) -> str:
    url = launcher.url
    return (
        f"ready: {url}  (Ctrl-C stops it; logs in {launcher.places.logs})\n"
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        '    -d \'{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16}\'\n'
        f"  evolving-infra role node1 prefill --url {url}"
    )
