"""Parts of a node's processes: counted blocks, preparing a request, the launcher's checks."""

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evolving_infra.cluster.counted import CountedBlocks
from evolving_infra.cluster.hasher import block_hasher
from evolving_infra.cluster.launcher import running_cluster
from evolving_infra.cluster.messages import join_keys, sampling_to_map
from evolving_infra.cluster.node import Node
from evolving_infra.cluster.places import Places
from evolving_infra.cluster.prepare import Preparer
from evolving_infra.config import ClusterConfig, EngineConfig
from evolving_infra.engine.engine import Engine
from evolving_infra.engine.request import EngineRequest
from evolving_infra.errors import InputError, PeerError
from evolving_infra.types import SamplingParams

KEYS = tuple(bytes([i]) * 32 for i in range(4))


def told(*, counted: tuple[bytes, ...], uncounted: tuple[bytes, ...] = (), reset: bool) -> Any:
    return {"counted": join_keys(counted), "uncounted": join_keys(uncounted), "reset": reset}


def test_a_new_controller_ends_what_the_old_one_counted() -> None:
    state: dict[bytes, bool] = {}
    blocks = CountedBlocks(lambda keys, counted: state.update(dict.fromkeys(keys, counted)))
    blocks.told(told(counted=KEYS[:3], reset=True))
    blocks.told(told(counted=KEYS[3:], uncounted=KEYS[:1], reset=False))
    assert state == {KEYS[0]: False, KEYS[1]: True, KEYS[2]: True, KEYS[3]: True}
    blocks.told(told(counted=KEYS[1:2], reset=True))
    assert [key for key, counted in state.items() if counted] == [KEYS[1]]


class OwnStore:
    """A store whose fetches fail and whose own pool is fine."""

    def __init__(self) -> None:
        self.released: list[int] = []

    async def fetch(self, ticket: str, peer: str, keys: Any, deadline_s: float) -> Any:
        raise PeerError(f"{peer} is gone")

    async def host_blocks(self, keys: Any) -> tuple[str, int]:
        return "blocks", 5

    def release(self, lease: int) -> None:
        self.released.append(lease)


class Link:
    """What a preparer needs of a node's connections to stores."""

    def __init__(self, store: OwnStore | None) -> None:
        self.store = store

    async def peer(self, address: str) -> Any:
        raise PeerError(f"{address} is gone")


def request_of(tokens: int) -> EngineRequest:
    prompt = tuple(range(tokens))
    keys = block_hasher(EngineConfig()).chain(prompt)
    sampling = SamplingParams(max_tokens=4)
    return EngineRequest(
        request="r#1", prompt=prompt, output=(), keys=keys, sampling=sampling, stop_after_first=True
    )


def preparer(store: OwnStore | None) -> Preparer:
    return Preparer(Link(store), block_hasher(EngineConfig()), 1.0)  # type: ignore[arg-type]


def test_a_failed_fetch_leaves_what_the_own_pool_has() -> None:
    store = OwnStore()
    prepared = asyncio.run(preparer(store).prefill(request_of(40), [("unix:/x", KEYS[0])]))
    assert prepared.blocks == "blocks"
    assert prepared.fetched_blocks == 0
    assert prepared.release is not None
    prepared.release()
    assert store.released == [5]


def test_without_stores_everything_is_recomputed() -> None:
    assert asyncio.run(preparer(None).prefill(request_of(40), [])).blocks is None
    assert asyncio.run(preparer(None).decode(request_of(40), "unix:/gone")).blocks is None
    assert asyncio.run(preparer(None).decode(request_of(40), None)).blocks is None


def test_a_run_dir_that_others_may_write_to_is_refused_and_left_alone(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(InputError, match="run_dir: expected a folder of yours"):
        Places.create(shared)
    assert shared.stat().st_mode & 0o777 == 0o777
    assert Places.create(tmp_path / "new").run_dir.stat().st_mode & 0o777 == 0o700
    with pytest.raises(InputError, match="run_dir"):
        Places.create(tmp_path / ("long" * 40))


def test_a_run_dir_serves_one_cluster_at_a_time(tmp_path: Path) -> None:
    places = Places.create(tmp_path / "run")
    held = places.lock()
    with pytest.raises(InputError, match="run_dir: expected a folder that no running cluster"):
        Places.create(tmp_path / "run").lock()
    os.close(held)
    os.close(places.lock())


def test_a_taken_port_is_one_sentence_before_anything_starts(tmp_path: Path) -> None:
    async def start(port: int) -> None:
        async with running_cluster(ClusterConfig(split="1B", port=port), tmp_path / "run"):
            pytest.fail("it must not start")

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            InputError, match=f"host and port: expected .* got '127.0.0.1:{port} .A"
        ):
            asyncio.run(start(port))


def test_a_process_whose_launcher_is_gone_ends() -> None:
    code = "from evolving_infra.cluster.process import die_with_parent; die_with_parent()"
    for parent, expected in ((str(os.getpid()), 0), ("1", 1)):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "EVOLVING_INFRA_PARENT": parent},
            timeout=60,
        )
        assert done.returncode == expected


class NowEngine:
    """An engine's thread that runs every action at once, in the caller's."""

    def __init__(self) -> None:
        config = EngineConfig(device_pages=64, max_context_tokens=512)
        self.engine = Engine(config, block_hasher(config))
        self.pools = self.engine.pools

    def post(self, action: Any) -> None:
        action(self.engine, 0.0)

    def post_back(self, action: Any, then: Any) -> None:
        then(action(self.engine, 0.0))


class Told:
    """A controller's connection that records what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, dict[str, Any]]] = []

    def tell(self, op: str, **fields: Any) -> None:
        self.told.append((op, fields))


def test_a_request_the_engine_refuses_fails_alone() -> None:
    async def main() -> None:
        thread, channel = NowEngine(), Told()
        node = Node(ClusterConfig(), thread, Link(None))  # type: ignore[arg-type]
        await node.opened(channel)  # type: ignore[arg-type]
        order = {
            "attempt": 1,
            "prompt": [1, 2, 3],
            "output": [],
            "fetches": [],
            "sampling": {**sampling_to_map(SamplingParams(max_tokens=4)), "temperature": -1.0},
        }
        await node.handle(channel, "prefill", {**order, "request": "bad"})  # type: ignore[arg-type]
        good = {
            **order,
            "request": "good",
            "sampling": sampling_to_map(SamplingParams(max_tokens=4)),
        }
        await node.handle(channel, "prefill", good)  # type: ignore[arg-type]
        await asyncio.sleep(0)
        (failed,) = [fields for op, fields in channel.told if op == "failed"]
        assert failed["request"] == "bad"
        assert failed["text"].startswith("temperature: expected 0 or more")
        assert thread.engine.counters.queued == 1

    asyncio.run(main())
