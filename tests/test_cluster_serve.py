"""A served cluster through a client's eyes: OpenAI's package, bad input, roles, kills."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.error
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import OpenAI

from tests.conftest import free_port

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

PROMPT = [(7 * i * i + 3 * i) % 251 for i in range(300)]


def complete(cluster: Any, prompt: list[int], **fields: Any) -> dict[str, Any]:
    """One greedy completion of fixed length, token ids included."""
    headers = {k: v for k, v in fields.items() if k.startswith("X-")}
    body = {k: v for k, v in fields.items() if not k.startswith("X-")}
    options = {"max_tokens": 24, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return cluster.post("/v1/completions", {"prompt": prompt, **options, **body}, **headers)


def tokens_of(answer: dict[str, Any]) -> list[int]:
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


def cached_of(answer: dict[str, Any]) -> int:
    cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def test_a_cluster_serves_reuses_and_changes_roles(serve: Any) -> None:
    with serve("--split", "1P1D") as cluster:
        check_openai_package_works(cluster.url)
        check_continuation_reuses_prompt_and_output(cluster)
        check_tokens_survive_a_role_swap(cluster)
        check_bad_input_is_refused_and_serving_goes_on(cluster)
        check_command_line_changes_roles(cluster)


def refusal(call: Callable[[], object]) -> tuple[int, str]:
    """Status and sentence of a call that must be refused."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        call()
    with caught.value as error:
        return error.code, json.load(error)["error"]["message"]


def check_openai_package_works(url: str) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    whole = client.completions.create(model="tiny-mla-moe", prompt="def f(x):", max_tokens=12)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12 or whole.choices[0].finish_reason == "stop"
    stream = client.completions.create(
        model="tiny-mla-moe", prompt="def f(x):", max_tokens=12, stream=True
    )
    assert (
        "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == whole.choices[0].text
    )
    messages: Any = [{"role": "user", "content": "Grüße, 世界"}]
    chat = client.chat.completions.create(model="tiny-mla-moe", messages=messages, max_tokens=8)
    again = client.chat.completions.create(
        model="tiny-mla-moe", messages=messages, max_tokens=8, stream=True
    )
    parts = [c.choices[0].delta.content or "" for c in again if c.choices]
    assert "".join(parts) == chat.choices[0].message.content
    client.close()


def check_continuation_reuses_prompt_and_output(cluster: Any) -> None:
    first = complete(cluster, PROMPT, **{"X-Branch-Id": "agent"})
    assert cached_of(first) == 0
    longer = PROMPT + tokens_of(first) + [1, 2, 3]

    def stored_everything() -> bool:
        # what the decode node produced is in some host pool: prompt and output, whole blocks
        nodes = cluster.get("/v1/cluster/state")["nodes"]
        return sum(node["host_blocks_used"] for node in nodes) >= (len(longer) - 4) // 16

    cluster.wait_until(stored_everything, "written-through blocks")
    second = complete(cluster, longer, **{"X-Branch-Id": "agent"})
    assert cached_of(second) == (len(longer) - 4) // 16 * 16
    cluster.post("/v1/branches/agent/end", {})


def check_tokens_survive_a_role_swap(cluster: Any) -> None:
    before = tokens_of(complete(cluster, PROMPT[:200]))
    cluster.post("/v1/cluster/nodes/node1/role", {"role": "prefill"})
    cluster.post("/v1/cluster/nodes/node0/role", {"role": "decode"})
    after = complete(cluster, PROMPT[:200])
    assert tokens_of(after) == before
    assert cached_of(after) == 192
    changes = cluster.get("/v1/cluster/state")["role_changes"]
    assert [(c["node"], c["from"], c["to"]) for c in changes] == [
        ("node1", "decode", "prefill"),
        ("node0", "prefill", "decode"),
    ]
    assert all(c["blocks_lost"] == 0 and c["failed_requests"] == 0 for c in changes)


def check_bad_input_is_refused_and_serving_goes_on(cluster: Any) -> None:
    cases: list[tuple[int, dict[str, Any], dict[str, str], str]] = [
        (400, {"max_tokens": -1}, {}, "max_tokens"),
        (400, {"max_tokens": 10**9}, {}, "max_tokens"),
        (400, {"prompt": [1] * 9000}, {}, "prompt"),
        (400, {}, {"X-Branch-Id": "b", "X-Branch-Kind": "cousin"}, "X-Branch-Kind"),
        (400, {}, {"X-Branch-Id": "c", "X-Context-Version": "-2"}, "X-Context-Version"),
        (
            400,
            {},
            {"X-Branch-Id": "d", "X-Branch-Kind": "fork", "X-Parent-Branch-Id": "no"},
            "parent",
        ),
    ]
    for status, body, headers, word in cases:
        code, text = refusal(
            lambda b=body, h=headers: complete(cluster, **{"prompt": PROMPT, **b}, **h)
        )
        assert (code, word.lower() in text.lower()) == (status, True), text
    complete(cluster, PROMPT, **{"X-Branch-Id": "v", "X-Context-Version": "3"})
    back = {"X-Branch-Id": "v", "X-Context-Version": "2"}
    assert refusal(lambda: complete(cluster, PROMPT, **back))[0] == 400
    cluster.post("/v1/branches/v/end", {})
    assert refusal(lambda: cluster.post("/v1/branches/v/end", {}))[0] == 409
    assert refusal(lambda: cluster.post("/v1/branches/never-seen/end", {}))[0] == 404
    assert len(tokens_of(complete(cluster, PROMPT))) == 24


def check_command_line_changes_roles(cluster: Any) -> None:
    command = [sys.executable, "-m", "evolving_infra.cli", "role"]
    done = subprocess.run(
        [*command, "node0", "prefill", "--url", cluster.url], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "decode -> prefill" in done.stdout
    unknown = subprocess.run(
        [*command, "node7", "prefill", "--url", cluster.url], capture_output=True, text=True
    )
    assert unknown.returncode == 1
    assert "node7" in unknown.stderr


def test_kill_an_engine_then_a_store(serve: Any) -> None:
    with serve("--split", "1P1D") as cluster:
        truth = tokens_of(complete(cluster, PROMPT, max_tokens=64))
        pid = cluster.node("node0")["pid"]
        os.kill(pid, signal.SIGKILL)
        # re-routed while the engine is away: every node can do both phases
        assert tokens_of(complete(cluster, PROMPT, max_tokens=64)) == truth
        cluster.wait_until(
            lambda: cluster.node("node0")["up"] and cluster.node("node0")["pid"] != pid,
            "node0's engine back",
        )
        again = complete(cluster, PROMPT, max_tokens=64)
        assert tokens_of(again) == truth
        assert cached_of(again) == len(PROMPT) // 16 * 16, "the pool outlived its engine"

        store = cluster.node("node0")["store_pid"]
        os.kill(store, signal.SIGKILL)
        assert tokens_of(complete(cluster, PROMPT, max_tokens=64)) == truth
        cluster.wait_until(
            lambda: (
                cluster.node("node0")["store_up"] and cluster.node("node0")["store_pid"] != store
            ),
            "node0's store back",
        )
        assert tokens_of(complete(cluster, PROMPT[:100], max_tokens=8)) == tokens_of(
            complete(cluster, PROMPT[:100], max_tokens=8)
        )


def test_an_engine_killed_mid_request_does_not_change_its_tokens(serve: Any) -> None:
    with serve("--split", "1P1D") as cluster:
        truth = tokens_of(complete(cluster, PROMPT, max_tokens=400))

        async def killed_midway() -> list[int]:
            request = asyncio.create_task(
                asyncio.to_thread(complete, cluster, PROMPT, max_tokens=400)
            )
            await asyncio.to_thread(
                cluster.wait_until,
                lambda: cluster.node("node1")["running"] > 0,
                "the request decoding on node1",
            )
            os.kill(cluster.node("node1")["pid"], signal.SIGKILL)
            return tokens_of(await request)

        assert asyncio.run(killed_midway()) == truth


def test_what_can_not_run_is_said_at_once() -> None:
    command = [sys.executable, "-m", "evolving_infra.cli", "serve", "--port", str(free_port())]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "EVOLVING_INFRA_FAULT": "no_such_fault"},
        timeout=100,
    )
    assert done.returncode == 1
    assert "can't run" in done.stderr
    assert "EVOLVING_INFRA_FAULT: expected one of zero_restore" in done.stderr


def test_a_silent_engine_loses_its_requests_to_others_and_may_come_back(serve: Any) -> None:
    with serve("--split", "1P2D") as cluster:
        truth = tokens_of(complete(cluster, PROMPT, max_tokens=200))
        pids = {name: cluster.node(name)["pid"] for name in ("node1", "node2")}
        with ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(complete, cluster, PROMPT, max_tokens=200) for _ in range(4)]
            cluster.wait_until(
                lambda: cluster.node("node1")["running"] + cluster.node("node2")["running"] > 1,
                "requests decoding",
            )
            os.kill(pids["node1"], signal.SIGSTOP)
            try:
                assert [tokens_of(answer.result()) for answer in answers] == [truth] * 4
            finally:
                os.kill(pids["node1"], signal.SIGCONT)
        cluster.wait_until(lambda: cluster.node("node1")["up"], "node1 back")
        assert tokens_of(complete(cluster, PROMPT, max_tokens=200)) == truth
