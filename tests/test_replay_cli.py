"""The command line: every bad flag is one sentence on stderr, with nothing started."""

import socket
from pathlib import Path

import pytest

from evolving_infra import cli
from evolving_infra.cluster import serve as serving
from evolving_infra.replay import command

EXAMPLE = str(Path(__file__).parent.parent / "examples" / "trace_0026.jsonl")
NO_ADDRESS = "203.0.113.7"
"""Of a network for documentation: no machine has it."""


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    """Fails the test if a cluster would be started."""

    def started(*_):
        raise AssertionError("a cluster was started")

    monkeypatch.setattr(command, "running_cluster", started)
    monkeypatch.setattr(serving, "running_cluster", started)


def sentence(capsys, *arguments: str) -> str:
    """The one line that a refused command prints."""
    assert cli.main(list(arguments)) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line.removeprefix("evolving-infra: ")


@pytest.mark.parametrize("verb", [("serve",), ("replay", EXAMPLE)], ids=["serve", "replay"])
@pytest.mark.parametrize(
    ("flags", "text"),
    [
        *(
            ((f"--{name}", value), f"--{name}: expected a positive number, got {value}")
            for name in ("nodes", "page-size", "tp", "max-context", "l1-blocks", "l2-blocks")
            for value in ("0", "-3")
        ),
        (("--page-size", "17"), "page_size: expected one of (16, 32, 64), got 17"),
        (("--nodes", "2", "--split", "1P2D"), "split: expected roles for 2 nodes, got '1P2D'"),
        (("--port", "-1"), "--port: expected 0 to 65535, got -1"),
        (("--port", "70000"), "--port: expected 0 to 65535, got 70000"),
        (("--host", NO_ADDRESS), "--host, --port: expected an address to listen on, got 203.0."),
        (("--host", "a" * 70), "--host, --port: expected an address to listen on, got aaa"),
    ],
)
def test_cluster_flags(capsys, verb, flags, text):
    assert sentence(capsys, *verb, *flags).startswith(text)


def test_a_port_that_is_taken(capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        line = sentence(capsys, "serve", "--port", port)
    assert f"got 127.0.0.1 port {port}" in line


@pytest.mark.parametrize(
    ("host", "warned"), [("127.0.0.1", False), ("localhost", False), ("0.0.0.0", True)]
)
def test_a_host_that_others_can_reach_is_warned_about(capsys, monkeypatch, host, warned):
    monkeypatch.setattr(serving, "serve", lambda config, run_dir: 0)
    assert cli.main(["serve", "--host", host, "--port", "0"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == warned
    assert all("no authentication" in line for line in lines)


@pytest.mark.parametrize("target", ["absent/x.jsonl", "."])
def test_a_trace_that_cannot_be_written(capsys, tmp_path, target):
    line = sentence(capsys, "trace", "convert", EXAMPLE, str(tmp_path / target))
    assert line.startswith(f"{tmp_path}")
    assert "expected a writable file" in line


def test_a_demo_without_examples(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "EXAMPLES", tmp_path / "examples")
    assert sentence(capsys, "demo").startswith("demo: expected the example traces of a checkout")
