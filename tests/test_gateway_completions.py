"""POST /v1/completions: every form of prompt and answer, and what the cluster is given."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from evolving_infra.gateway.tokenizer import EOS, encode
from evolving_infra.types import BranchKind, SamplingParams
from tests.test_gateway_fake import EchoCluster, run, serving


async def post(client: aiohttp.ClientSession, body: dict[str, Any], **headers: str) -> Any:
    """The JSON answer of a request that must succeed."""
    async with client.post("/v1/completions", json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "application/json"
        return await response.json()


async def events(client: aiohttp.ClientSession, body: dict[str, Any]) -> list[Any]:
    """The events of a stream that must succeed, without the final ``[DONE]``."""
    async with client.post("/v1/completions", json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        assert response.headers["X-Accel-Buffering"] == "no"
        assert response.headers["X-Request-Id"].startswith("cmpl-")
        text = (await response.read()).decode()
    *lines, done, end = text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def ask(body: dict[str, Any], cluster: EchoCluster | None = None) -> Any:
    """The answer of a fresh gateway."""

    async def main() -> Any:
        async with serving(cluster or EchoCluster()) as client:
            return await post(client, body)

    return run(main())


def stream(body: dict[str, Any], cluster: EchoCluster | None = None) -> list[Any]:
    """The events of a fresh gateway."""

    async def main() -> list[Any]:
        async with serving(cluster or EchoCluster()) as client:
            return await events(client, body)

    return run(main())


def test_whole_answer() -> None:
    answer = ask({"model": "echo", "prompt": "abc", "max_tokens": 5})
    assert answer.pop("id").startswith("cmpl-")
    assert answer.pop("created") > 1_700_000_000
    choice = {"index": 0, "text": "abcab", "logprobs": None, "finish_reason": "length"}
    assert answer == {
        "object": "text_completion",
        "model": "echo",
        "choices": [choice],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 5,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 3},
        },
    }


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["aba"]),
        ([97, 98], ["aba"]),
        (["ab", "c"], ["aba", "ccc"]),
        ([[97, 98], [99]], ["aba", "ccc"]),
    ],
    ids=["text", "tokens", "texts", "token-lists"],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_every_form_of_prompt(prompt: Any, texts: list[str], streamed: bool) -> None:
    body = {"prompt": prompt, "max_tokens": 3}
    if not streamed:
        assert [choice["text"] for choice in ask(body)["choices"]] == texts
        return
    got = [""] * len(texts)
    reasons: list[Any] = [None] * len(texts)
    for event in stream(body):
        (choice,) = event["choices"]
        got[choice["index"]] += choice["text"]
        reasons[choice["index"]] = choice["finish_reason"]
    assert (got, reasons) == (texts, ["length"] * len(texts))


def test_several_prompts_add_up_in_the_usage() -> None:
    usage = ask({"prompt": ["ab", "c"], "max_tokens": 3})["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 6)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 6}


def test_defaults_of_a_submission() -> None:
    cluster = EchoCluster()
    identity = ask({"prompt": "a"}, cluster)["id"]
    (given,) = cluster.submissions
    assert given.request == identity
    assert (given.branch, given.anonymous) == (f"anon-{identity}", True)
    assert (given.kind, given.parent, given.version) == (BranchKind.ROOT, None, 0)
    assert given.tokens == (97,)
    assert given.sampling == SamplingParams(max_tokens=16, seed=given.sampling.seed)


def test_options_reach_the_cluster() -> None:
    cluster = EchoCluster()
    body = {"temperature": 0.5, "top_p": 0.25, "seed": 7, "ignore_eos": True}
    ask({"prompt": "a", "max_tokens": 2, "stop_token_ids": [5], **body}, cluster)
    assert cluster.submissions[0].sampling == SamplingParams(
        max_tokens=2, temperature=0.5, top_p=0.25, seed=7, ignore_eos=True, stop_token_ids=(5,)
    )


def test_requests_without_a_seed_get_different_ones() -> None:
    cluster = EchoCluster()
    ask({"prompt": ["a", "a"]}, cluster)
    first, second = cluster.submissions
    assert first.sampling.seed != second.sampling.seed
    assert first.branch != second.branch


def test_a_negative_seed_is_legal() -> None:
    cluster = EchoCluster()
    ask({"prompt": "a", "seed": -1}, cluster)
    assert cluster.submissions[0].sampling.seed == 2**63 - 1


def test_null_is_absent_and_unknown_fields_are_ignored() -> None:
    names = ("max_tokens", "stop", "stream", "seed", "logprobs", "n", "echo", "stream_options")
    answer = ask({"prompt": "a", "surprise": [1], **dict.fromkeys(names)})
    assert answer["usage"]["completion_tokens"] == 16


def test_end_of_sequence_finishes_with_stop() -> None:
    answer = ask({"prompt": [97, EOS], "max_tokens": 9, "return_token_ids": True})
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("a", "stop")
    assert choice["token_ids"] == [97, EOS]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_stop_string_cuts_the_text_and_aborts_the_rest(streamed: bool) -> None:
    cluster = EchoCluster(delta_tokens=3)
    body = {"prompt": "abcdef", "max_tokens": 60, "stop": ["cdx", "de"], "return_token_ids": True}
    if streamed:
        chunks = [event["choices"][0] for event in stream(body, cluster)]
        text = "".join(chunk["text"] for chunk in chunks)
        tokens = [token for chunk in chunks for token in chunk["token_ids"]]
        reason = chunks[-1]["finish_reason"]
    else:
        answer = ask(body, cluster)
        (choice,) = answer["choices"]
        text, tokens, reason = choice["text"], choice["token_ids"], choice["finish_reason"]
        assert answer["usage"]["completion_tokens"] == 5
        assert answer["usage"]["prompt_tokens_details"] is None
    assert (text, reason) == ("abc", "stop")
    assert tokens == encode("abcde")
    assert cluster.aborted == {cluster.submissions[0].request}


def test_timings_are_null_if_a_stop_string_ended_the_request() -> None:
    answer = ask({"prompt": "ab", "stop": "b", "return_timings": True})
    assert answer["timings"] is None


def test_token_ids_and_timings_of_a_whole_answer() -> None:
    body = {"prompt": "ab", "max_tokens": 3, "return_token_ids": True, "return_timings": True}
    answer = ask(body)
    assert answer["choices"][0]["token_ids"] == [97, 98, 97]
    assert answer["choices"][0]["prompt_token_ids"] == [97, 98]
    assert answer["timings"] == {
        "queue": 0.5,
        "fetch": 0.0,
        "exposed": 0.0,
        "prefill": 0.0,
        "handoff": 0.0,
        "cached_tokens": 3,
        "fetched_blocks": 0,
        "prefill_node": "node0",
        "decode_node": "node1",
    }


def test_token_ids_and_timings_of_a_stream() -> None:
    body = {"prompt": "ab", "max_tokens": 3, "return_token_ids": True, "return_timings": True}
    first, *parts, last = stream(body)
    assert first["choices"][0]["prompt_token_ids"] == [97, 98]
    tokens = [token for part in parts for token in part["choices"][0]["token_ids"]]
    assert tokens == [97, 98, 97]
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert last["timings"]["decode_node"] == "node1"
    assert not any("timings" in part or "usage" in part for part in parts)


def test_usage_comes_only_when_asked_for() -> None:
    body = {"prompt": "ab", "max_tokens": 3}
    assert all(event["choices"] for event in stream(body))
    last = stream({**body, "stream_options": {"include_usage": True}})[-1]
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 3)
    assert "timings" not in last


def test_a_character_split_over_tokens_comes_whole() -> None:
    texts = [event["choices"][0]["text"] for event in stream({"prompt": "€", "max_tokens": 7})]
    assert texts == ["€", "€", "\ufffd"]


def test_every_token_has_its_chunk_if_ids_are_asked_for() -> None:
    body = {"prompt": "€", "max_tokens": 3, "return_token_ids": True}
    ids = [event["choices"][0]["token_ids"] for event in stream(body)]
    assert ids == [[], [0xE2], [0x82], [0xAC], []]


def test_branch_headers_reach_the_cluster() -> None:
    cluster = EchoCluster()

    async def main() -> None:
        async with serving(cluster) as client:
            headers = {
                "X-Branch-Id": "task/1#b",
                "X-Context-Version": "3",
                "X-Parent-Branch-Id": "task/1",
                "X-Branch-Kind": "subagent",
            }
            await post(client, {"prompt": "a"}, **headers)

    run(main())
    (given,) = cluster.submissions
    assert (given.branch, given.version, given.anonymous) == ("task/1#b", 3, False)
    assert (given.kind, given.parent) == (BranchKind.SUBAGENT, "task/1")


def test_many_requests_at_once_do_not_mix() -> None:
    async def main() -> list[str]:
        async with serving(EchoCluster()) as client:
            prompts = [chr(97 + i % 26) * (1 + i // 26) for i in range(100)]
            one, other = prompts[:50], prompts[50:]
            whole = asyncio.gather(*(post(client, {"prompt": p}) for p in one))
            parts = asyncio.gather(*(events(client, {"prompt": p}) for p in other))
            texts = [answer["choices"][0]["text"] for answer in await whole]
            for chunks in await parts:
                texts.append("".join(chunk["choices"][0]["text"] for chunk in chunks))
            return texts

    assert run(main()) == [chr(97 + i % 26) * 16 for i in range(100)]
