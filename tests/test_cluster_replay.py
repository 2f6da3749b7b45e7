"""Replays of a real trace on real clusters: exact, lossless, and controls that must fail."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

TRACE = Path(__file__).resolve().parent.parent / "examples" / "trace_0291.jsonl"
QUICK = ("--time-scale", "1/100", "--max-wait", "1")
KEYS = {
    *("requests", "failed", "tokens", "kv_hit", "ideal_kv_hit", "lost_reuse", "ttft", "e2e"),
    *("queue", "fetch", "exact", "role_changes", "nodes", "seed", "command"),
}


def replay(target: Path, *flags: str, **environment: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, JSON report and printed text of ``evolving-infra replay``."""
    command = [sys.executable, "-m", "evolving_infra.cli", "replay", str(TRACE), *QUICK, *flags]
    done = subprocess.run(
        [*command, "--json", str(target)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=280,
    )
    report = json.loads(target.read_text()) if target.exists() else {}
    return done.returncode, report, done.stdout + done.stderr


def test_a_replay_with_role_changes_is_exact_and_loses_nothing(tmp_path: Path) -> None:
    changes = ("--role-change", "node1:prefill@3s", "--role-change", "node1:decode@6s")
    code, report, text = replay(tmp_path / "report.json", "--check-exact", "12", *changes)
    assert code == 0, text
    assert set(report) >= KEYS
    assert (report["requests"], report["failed"]) == (32, 0)
    assert report["exact"] == {"checked": 12, "inexact": 0}
    assert report["lost_reuse"] <= 0.02
    assert [(c["from"], c["to"]) for c in report["role_changes"]] == [
        ("decode", "prefill"),
        ("prefill", "decode"),
    ]
    for change in report["role_changes"]:
        assert change["blocks_lost"] == 0
        assert change["failed_requests"] == 0
    tokens = report["tokens"]
    assert tokens["cached"] + tokens["recomputed"] == tokens["prompt"]


def test_gqa_with_sampling_is_exact_too(tmp_path: Path) -> None:
    model = ("--model", "tiny-gqa", "--page-size", "32", "--temperature", "0.8", "--seed", "5")
    code, report, text = replay(tmp_path / "report.json", "--check-exact", "8", *model)
    assert code == 0, text
    assert report["exact"] == {"checked": 8, "inexact": 0}


def test_zeroed_restores_are_found_inexact(tmp_path: Path) -> None:
    code, report, text = replay(tmp_path / "r.json", EVOLVING_INFRA_FAULT="zero_restore")
    assert code == 1
    assert report["exact"]["inexact"] > 0
    assert report["failed"] == 0
    assert "inexact" in text


def test_zeroed_restores_are_misses_when_pages_are_verified(tmp_path: Path) -> None:
    code, report, text = replay(
        tmp_path / "r.json", "--verify", "device", EVOLVING_INFRA_FAULT="zero_restore"
    )
    assert code == 0, text
    assert report["exact"]["inexact"] == 0
    assert report["exact"]["checked"] == 20


@pytest.mark.parametrize("victim", ["pid", "store_pid"], ids=["engine", "store"])
def test_kill_during_a_replay(serve: Any, tmp_path: Path, victim: str) -> None:
    with serve("--split", "1P2D") as cluster:
        command = [sys.executable, "-m", "evolving_infra.cli", "replay", str(TRACE), *QUICK]
        target = tmp_path / "report.json"
        process = subprocess.Popen(
            [*command, "--url", cluster.url, "--check-exact", "20", "--json", str(target)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        cluster.wait_until(
            lambda: cluster.node("node0")["prefill_tokens"] > 2000,
            "node0 in the middle of its work",
        )
        os.kill(cluster.node("node0")[victim], signal.SIGKILL)
        text = process.communicate(timeout=200)[0]
        assert process.returncode == 0, text
        report = json.loads(target.read_text())
        assert report["failed"] == 0
        assert report["exact"] == {"checked": 20, "inexact": 0}
        if victim == "pid":
            assert report["lost_reuse"] <= 0.05, "the pool outlived its engine"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "empty"),
        ('{"id": "x", "requests": [', "JSON"),
        ('{"hello": 1}', "expected"),
    ],
    ids=["empty", "truncated", "foreign"],
)
def test_a_broken_trace_is_one_sentence(tmp_path: Path, content: str, words: str) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text(content)
    done = subprocess.run(
        [sys.executable, "-m", "evolving_infra.cli", "replay", str(broken)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1
    assert words.lower() in done.stderr.lower()
    assert "broken.json" in done.stderr
