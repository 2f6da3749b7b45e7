"""The verb ``replay``: its files, its exit code, its tokens, and flags refused before any work."""

import argparse
import asyncio
import json
from pathlib import Path

import pytest
from aiohttp import web

from evolving_infra.config import ClusterConfig
from evolving_infra.errors import InputError
from evolving_infra.replay import command
from evolving_infra.replay.command import replay
from tests.test_replay_fake import FakeGateway

EXAMPLE = Path(__file__).parent.parent / "examples" / "trace_0026.jsonl"


def flags(**more) -> argparse.Namespace:
    fields = {"traces": [EXAMPLE], "url": None, "token_scale": "1/64", "time_scale": "1/10000"}
    fields |= {"max_wait": None, "concurrency": None, "temperature": 0.0, "seed": 3}
    fields |= {"check_exact": 0, "role_change": None, "json": None, "run_dir": None}
    return argparse.Namespace(**(fields | more))


def verb(gateway: FakeGateway, **more) -> int:
    """The verb runs its own loop, so it gets its own thread."""

    async def whole() -> int:
        async with gateway.running() as url:
            cluster = ClusterConfig()
            return await asyncio.to_thread(replay, flags(url=url, **more), lambda tokens: cluster)

    return asyncio.run(whole())


def test_the_verb_writes_json_and_its_exit_code_tells_failures(tmp_path, capsys):
    target = tmp_path / "out.json"
    assert verb(FakeGateway(), json=target) == 0
    assert json.loads(target.read_text())["failed"] == 0
    assert "KV reuse" in capsys.readouterr().out
    assert verb(FakeGateway(fail={"main 1": "refuse"}), json=target) == 1
    assert json.loads(target.read_text())["failed"] == 1


def test_two_replays_on_one_cluster_send_different_tokens():
    first, second = FakeGateway(), FakeGateway()
    assert (verb(first), verb(second)) == (0, 0)
    one, other = (gateway.requests["main 0"]["prompt"] for gateway in (first, second))
    assert len(one) == len(other)
    assert one[:16] != other[:16]


def test_two_replays_on_new_clusters_send_the_same_tokens():
    runs = [
        command._wanted(flags(), command._workloads(flags()), (), ClusterConfig()) for _ in range(2)
    ]
    assert runs[0].run != runs[1].run
    assert [run.salt for run in runs] == ["", ""]


def test_a_gateway_of_something_else_is_refused():
    class Other(FakeGateway):
        async def state(self, _):
            return web.json_response({"config": {"colour": 1}})

    with pytest.raises(InputError, match="url: expected a gateway of this version, got 'http"):
        verb(Other())


@pytest.fixture
def no_cluster(monkeypatch):
    """Fails the test if a cluster would be started."""

    def started(*_):
        raise AssertionError("a cluster was started")

    monkeypatch.setattr(command, "running_cluster", started)


@pytest.mark.usefixtures("no_cluster")
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"concurrency": 0}, "concurrency: expected a positive number, got 0"),
        ({"check_exact": -1}, "check_exact: expected a number >= 0, got -1"),
        ({"temperature": 9.0}, "temperature: expected a number from 0 to 2, got 9.0"),
        ({"seed": -1}, "seed: expected an integer from 0 to"),
        ({"role_change": ["node7:both@1s"]}, "role-change: expected a node of node0, node1, node2"),
        ({"role_change": ["node1"]}, "role change: expected NODE:prefill"),
        ({"token_scale": "0"}, "scale: expected a positive number such as 1/32, got '0'"),
        ({"token_scale": "9" * 5000}, "scale: expected a positive number such as 1/32"),
        ({"token_scale": "1"}, "token scale: expected requests of at most 8192 tokens"),
        ({"max_wait": -1.0}, "max_wait: expected at least 0 s, got -1.0"),
        ({"max_wait": float("nan")}, "max_wait: expected at least 0 s, got nan"),
        ({"json": Path("/nonexistent/x.json")}, "json: expected a file in a folder that exists"),
        ({"json": Path("/")}, "json: expected a file in a folder that exists"),
    ],
)
def test_wrong_flags_are_refused_before_a_cluster_is_started(change, text):
    with pytest.raises(InputError) as caught:
        replay(flags(**change), lambda tokens: ClusterConfig())
    assert str(caught.value).startswith(text)


@pytest.mark.usefixtures("no_cluster")
def test_a_file_that_cannot_be_written_is_refused_early(tmp_path, monkeypatch):
    monkeypatch.setattr(command.os, "access", lambda path, _: path != tmp_path)
    with pytest.raises(InputError, match="json: expected a file that can be written"):
        replay(flags(json=tmp_path / "x.json"), lambda tokens: ClusterConfig())


def test_a_file_that_fails_when_written_is_one_sentence(tmp_path):
    class Vanishing(FakeGateway):
        async def complete(self, request):
            (tmp_path / "x.json").mkdir(exist_ok=True)
            return await super().complete(request)

    with pytest.raises(InputError, match=r"json: expected a writable file, got .*Is a directory"):
        verb(Vanishing(), json=tmp_path / "x.json")
