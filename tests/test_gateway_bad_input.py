"""Bad input: a 4xx with one sentence that names field, expected and got; the gateway serves on."""

import json
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from evolving_infra.errors import InputError
from evolving_infra.gateway.fields import parse_json
from evolving_infra.gateway.requests import parse_chat, parse_completion
from evolving_infra.gateway.settings import GatewaySettings
from evolving_infra.types import Role
from tests.test_gateway_fake import SETTINGS, EchoCluster, run, serving

JSON = {"Content-Type": "application/json"}
CONTEXT = SETTINGS.max_context_tokens

BOTH = [
    ({"max_tokens": 0}, "max_tokens: expected an integer from 1 to 200, got 0"),
    ({"max_tokens": -5}, "max_tokens: expected an integer from 1 to 200, got -5"),
    ({"max_tokens": 201}, "max_tokens: expected an integer from 1 to 200, got 201"),
    ({"max_tokens": 10**30}, "max_tokens: expected an integer from 1 to 200, got 1000"),
    ({"max_tokens": 1.0}, "max_tokens: expected an integer from 1 to 200, got 1.0"),
    ({"max_tokens": True}, "max_tokens: expected an integer from 1 to 200, got True"),
    ({"max_tokens": "5"}, "max_tokens: expected an integer from 1 to 200, got '5'"),
    ({"temperature": -0.1}, "temperature: expected a number from 0.0 to 2.0, got -0.1"),
    ({"temperature": 2.1}, "temperature: expected a number from 0.0 to 2.0, got 2.1"),
    ({"temperature": False}, "temperature: expected a number from 0.0 to 2.0, got False"),
    ({"temperature": 10**400}, "temperature: expected a number from 0.0 to 2.0, got 1000"),
    ({"top_p": 0}, "top_p: expected a number above 0, at most 1, got 0.0"),
    ({"top_p": 1.5}, "top_p: expected a number from 0.0 to 1.0, got 1.5"),
    ({"seed": 1.5}, "seed: expected an integer from -9223372036854775808 to "),
    ({"seed": 2**63}, "seed: expected an integer from "),
    ({"stop": 5}, "stop: expected a string or up to 4 strings of 1 to 1000 characters, got 5"),
    ({"stop": ""}, "stop: expected a string or up to 4 strings of 1 to 1000 characters, got ''"),
    ({"stop": ["a"] * 5}, "stop: expected a string or up to 4 strings"),
    ({"stop": ["a", 1]}, "stop: expected a string or up to 4 strings"),
    ({"stop": "a" * 1001}, "stop: expected a string or up to 4 strings"),
    (
        {"stop_token_ids": [260]},
        "stop_token_ids: expected a list of at most 64 token ids from 0 to 259, got [260]",
    ),
    ({"stop_token_ids": 4}, "stop_token_ids: expected a list of at most 64 token ids from 0"),
    ({"n": 2}, "n: expected nothing or 1 (not supported by the embedded model), got 2"),
    ({"n": True}, "n: expected nothing or 1 (not supported by the embedded model), got True"),
    ({"stream": "yes"}, "stream: expected true or false, got 'yes'"),
    ({"stream": 1}, "stream: expected true or false, got 1"),
    (
        {"stream_options": {"include_usage": True}},
        "stream_options: expected only with stream: true",
    ),
    ({"stream_options": 1}, "stream_options: expected an object, got 1"),
    (
        {"stream": True, "stream_options": {"include_usage": 1}},
        "stream_options.include_usage: expected true or false, got 1",
    ),
    ({"ignore_eos": 0}, "ignore_eos: expected true or false, got 0"),
    ({"return_token_ids": "x"}, "return_token_ids: expected true or false, got 'x'"),
    ({"return_timings": []}, "return_timings: expected true or false, got []"),
    ({"logprobs": 1}, "logprobs: expected nothing or false (not supported by the embedded model)"),
    ({"logit_bias": {"1": 2}}, "logit_bias: expected nothing or {} (not supported"),
    ({"presence_penalty": 0.5}, "presence_penalty: expected nothing or 0 or 0.0 (not supported"),
]

COMPLETION = [
    ({"prompt": None}, "prompt: expected a string, a list of token ids, or a list of either"),
    ({"prompt": 5}, "prompt: expected a string, a list of token ids, or a list of either, got 5"),
    ({"prompt": []}, "prompt: expected a string, a list of token ids, or a list of either, got []"),
    ({"prompt": ""}, "prompt: expected at least one token, got ''"),
    ({"prompt": ["a", ""]}, "prompt[1]: expected at least one token, got ''"),
    ({"prompt": [[]]}, "prompt[0]: expected at least one token, got []"),
    ({"prompt": [1, -1]}, "prompt[1]: expected a token id from 0 to 259, got -1"),
    ({"prompt": [260]}, "prompt[0]: expected a token id from 0 to 259, got 260"),
    ({"prompt": [1, "a"]}, "prompt[1]: expected a token id from 0 to 259, got 'a'"),
    ({"prompt": [1, True]}, "prompt[1]: expected a token id from 0 to 259, got True"),
    ({"prompt": [1.5]}, "prompt[0]: expected a token id, a string or a list of token ids, got 1.5"),
    ({"prompt": ["a", [1]]}, "prompt[1]: expected a string, as before it, got [1]"),
    ({"prompt": [[1], "a"]}, "prompt[1]: expected a list of token ids, as before it, got 'a'"),
    ({"prompt": [[1], [2, 999]]}, "prompt[1][1]: expected a token id from 0 to 259, got 999"),
    ({"prompt": ["a"] * 129}, "prompt: expected at most 128 prompts, got '129 prompts'"),
    ({"prompt": "a\ud800"}, "prompt: expected valid Unicode text, got '\\ud800'"),
    (
        {"prompt": "a" * 185},
        "prompt: expected at most 200 tokens of context, got 185 of prompt and 16 of max_tokens",
    ),
    ({"echo": True}, "echo: expected nothing or false (not supported by the embedded model)"),
    ({"best_of": 3}, "best_of: expected nothing or 1 (not supported by the embedded model)"),
    ({"suffix": "x"}, 'suffix: expected nothing or "" (not supported by the embedded model)'),
    ({"logprobs": 0}, "logprobs: expected nothing or false (not supported by the embedded model)"),
    (
        {"prompt": ["a", "b"], "return_timings": True},
        "return_timings: expected one prompt, got '2 prompts'",
    ),
]

MESSAGES = [
    (None, "messages: expected a list of at least one message, got None"),
    ([], "messages: expected a list of at least one message, got []"),
    ("hi", "messages: expected a list of at least one message, got 'hi'"),
    (["hi"], "messages[0]: expected an object with role and content, got 'hi'"),
    ([{"content": "a"}], "messages[0].role: expected one of system, developer, user, assistant"),
    ([{"role": ["user"], "content": "a"}], "messages[0].role: expected one of system"),
    (
        [{"role": "user"}],
        "messages[0].content: expected a string or a list of text parts",
    ),
    ([{"role": "user", "content": []}], "messages[0].content: expected a string or a list of text"),
    ([{"role": "user", "content": ["a"]}], "messages[0].content[0]: expected an object with type"),
    (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        "messages[0].content[0].type: expected text (the embedded model reads nothing else), "
        "got 'image_url'",
    ),
    (
        [{"role": "user", "content": [{"type": "text"}]}],
        "messages[0].content[0].text: expected a string, got None",
    ),
    (
        [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{}]}],
        "messages[1].tool_calls: expected nothing (not supported by the embedded model)",
    ),
    ([{"role": "user", "content": "\ud800"}], "messages[0].content: expected valid Unicode text"),
    (
        [{"role": "user", "content": "a" * 300}],
        "messages: expected at most 200 tokens of context, got 319 of prompt and 1 of max_tokens",
    ),
]

CHAT = [
    ({"tools": [{"type": "function"}]}, "tools: expected nothing or [] (not supported by the"),
    ({"tool_choice": "auto"}, 'tool_choice: expected nothing or "none" (not supported by the'),
    ({"response_format": {"type": "json_object"}}, "response_format: expected nothing or "),
    (
        {"logprobs": True},
        "logprobs: expected nothing or false (not supported by the embedded model)",
    ),
    ({"modalities": ["audio"]}, 'modalities: expected nothing or ["text"] (not supported by the'),
    ({"audio": {}}, "audio: expected nothing (not supported by the embedded model), got {}"),
    (
        {"max_tokens": 5, "max_completion_tokens": 6},
        "max_tokens: expected the same as max_completion_tokens (6), got 5",
    ),
    (
        {"max_completion_tokens": 0},
        "max_completion_tokens: expected an integer from 1 to 200, got 0",
    ),
]


@pytest.mark.parametrize(("fields", "sentence"), BOTH + COMPLETION)
def test_completion_body(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_completion({"prompt": "a", **fields}, SETTINGS)
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("fields", "sentence"), BOTH + CHAT + [({"messages": m}, text) for m, text in MESSAGES]
)
def test_chat_body(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_chat({"messages": [{"role": "user", "content": "a"}], **fields}, SETTINGS)
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "body: expected a JSON object, got "),
        (b"{", "body: expected a JSON object, got "),
        (b"[1]", "body: expected a JSON object, got [1]"),
        (b'"x"', "body: expected a JSON object, got 'x'"),
        (b'{"a": NaN}', "body: expected a JSON object, got 'NaN is not a JSON number'"),
        (b'{"a": ' + b"9" * 5000 + b"}", "body: expected a JSON object, got "),
        (b'{"a": ' + b"[" * 100_000, "body: expected a JSON object, got "),
        (b'{"a": "\xff"}', "body: expected UTF-8 text, got 'byte 0xff at offset 7'"),
    ],
    ids=["empty", "cut", "list", "string", "nan", "huge-number", "deep", "not-utf8"],
)
def test_body_that_is_not_a_json_object(data: bytes, sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_json(data)
    assert str(caught.value).startswith(sentence)


def test_a_prompt_that_just_fits_is_taken() -> None:
    asked = parse_completion({"prompt": "a" * (CONTEXT - 16)}, SETTINGS)
    assert len(asked.prompts[0]) + asked.max_tokens == CONTEXT


async def refused(response: aiohttp.ClientResponse, status: int) -> dict[str, Any]:
    """The error of an answer that must have ``status``."""
    assert response.status == status, await response.text()
    assert response.content_type == "application/json"
    body = await response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


HEADERS = [
    ({"X-Branch-Id": ""}, "X-Branch-Id: expected 1 to 256 characters of"),
    ({"X-Branch-Id": "a b"}, "X-Branch-Id: expected 1 to 256 characters of"),
    ({"X-Branch-Id": "a" * 257}, "X-Branch-Id: expected 1 to 256 characters of"),
    ({"X-Context-Version": "1"}, "X-Branch-Id: expected with X-Context-Version, got no such"),
    ({"X-Parent-Branch-Id": "p"}, "X-Branch-Id: expected with X-Parent-Branch-Id, got no such"),
    ({"X-Branch-Kind": "fork"}, "X-Branch-Id: expected with X-Branch-Kind, got no such header"),
    *(
        (
            {"X-Branch-Id": "a", "X-Context-Version": version},
            f"X-Context-Version: expected an integer from 0 to 999999999, got {version!r}",
        )
        for version in ("-1", "1.5", "x", "", "1_0", "+1", "\u0664", "9" * 10)
    ),
    (
        {"X-Branch-Id": "a", "X-Parent-Branch-Id": "p", "X-Branch-Kind": "clone"},
        "X-Branch-Kind: expected fork or subagent, got 'clone'",
    ),
    (
        {"X-Branch-Id": "a", "X-Branch-Kind": "fork"},
        "X-Parent-Branch-Id: expected with X-Branch-Kind, got no such header",
    ),
    (
        {"X-Branch-Id": "a", "X-Parent-Branch-Id": "p"},
        "X-Branch-Kind: expected with X-Parent-Branch-Id, got no such header",
    ),
    (
        {"X-Branch-Id": "a", "X-Parent-Branch-Id": "a", "X-Branch-Kind": "fork"},
        "X-Parent-Branch-Id: expected a branch other than X-Branch-Id, got 'a'",
    ),
]


def test_branch_headers() -> None:
    async def main() -> None:
        cluster = EchoCluster()
        async with serving(cluster) as client:
            for headers, sentence in HEADERS:
                answer = client.post("/v1/completions", json={"prompt": "a"}, headers=headers)
                async with answer as response:
                    error = await refused(response, 400)
                assert error["message"].startswith(sentence)
                assert error["param"] == sentence.split(":")[0]
        assert cluster.submissions == []

    run(main())


def test_a_branch_header_that_comes_twice_is_refused() -> None:
    async def main() -> None:
        async with serving(EchoCluster()) as client:
            headers = [("X-Branch-Id", "a"), ("X-Branch-Id", "b")]
            async with client.post(
                "/v1/completions", json={"prompt": "a"}, headers=headers
            ) as response:
                error = await refused(response, 400)
            assert error["message"] == "X-Branch-Id: expected one value, got ['a', 'b']"

    run(main())


def test_several_prompts_cannot_share_a_branch() -> None:
    async def main() -> None:
        async with serving(EchoCluster()) as client:
            headers = {"X-Branch-Id": "a"}
            async with client.post(
                "/v1/completions", json={"prompt": ["a", "b"]}, headers=headers
            ) as response:
                error = await refused(response, 400)
            assert (
                error["message"] == "prompt: expected one prompt with X-Branch-Id, got '2 prompts'"
            )

    run(main())


def test_http_errors_are_json_and_the_gateway_serves_on() -> None:
    async def main() -> None:
        settings = replace(SETTINGS, max_body_bytes=1000)
        async with serving(EchoCluster(), settings) as client:
            for route in ("/v1/completions", "/v1/chat/completions"):
                async with client.post(route, data=b"{", headers=JSON) as response:
                    assert (await refused(response, 400))["param"] == "body"
                async with client.post(route, data=b'"\xff"', headers=JSON) as response:
                    assert "UTF-8" in (await refused(response, 400))["message"]
                async with client.post(route, data=b" " * 1001, headers=JSON) as response:
                    assert "1000" in (await refused(response, 413))["message"]
                async with client.get(route) as response:
                    await refused(response, 405)
                    assert response.headers["Allow"] == "POST"
            async with client.get("/v1/nothing") as response:
                assert "GET /v1/nothing: Not Found" in (await refused(response, 404))["message"]
            async with client.post("/v1/completions", json={"prompt": "ab"}) as response:
                assert response.status == 200

    run(main())


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Type": "application/json"}, 200),
        ({"Content-Type": "Application/JSON; charset=utf-8"}, 200),
        ({}, 200),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Origin": "http://a.page"}, 415),
        ({"Origin": "http://a.page", "Content-Type": "application/json"}, 200),
    ],
)
def test_only_json_is_read(headers: dict[str, str], status: int) -> None:
    async def main() -> None:
        cluster = EchoCluster()
        async with serving(cluster) as client:
            for route, body in (
                ("/v1/completions", {"prompt": "a"}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
                ("/v1/cluster/nodes/node0/role", {"role": "decode"}),
            ):
                async with client.post(
                    route,
                    data=json.dumps(body).encode(),
                    headers=headers,
                    skip_auto_headers=["Content-Type"],
                ) as response:
                    if status == 200:
                        assert response.status == 200
                        continue
                    error = await refused(response, status)
                assert error["message"].startswith("Content-Type: expected application/json, got ")
        assert bool(cluster.submissions) == (status == 200)
        assert (cluster.roles["node0"] is Role.DECODE) == (status == 200)

    run(main())


def test_a_context_that_is_too_long_has_its_code() -> None:
    async def main() -> None:
        async with serving(EchoCluster()) as client:
            body = {"prompt": "a" * 500, "stream": True}
            async with client.post("/v1/completions", json=body) as response:
                error = await refused(response, 400)
            assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")

    run(main())


def test_a_model_that_is_no_string_is_refused() -> None:
    async def main() -> None:
        async with serving(EchoCluster()) as client:
            async with client.post("/v1/completions", json={"model": 5}) as response:
                error = await refused(response, 400)
            assert error["message"] == "model: expected a string, got 5"

    run(main())


@pytest.mark.parametrize(
    ("field", "value"),
    [("model", ""), ("port", -1), ("max_context_tokens", 0), ("shutdown_s", -1.0), ("state_s", 0)],
)
def test_settings(field: str, value: Any) -> None:
    good: dict[str, Any] = {"model": "m", "max_context_tokens": 10}
    with pytest.raises(InputError, match=f"^{field}: expected"):
        GatewaySettings(**{**good, field: value})


def test_a_body_that_is_not_what_its_encoding_says_is_refused() -> None:
    async def main() -> None:
        async with serving(EchoCluster()) as client:
            headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
            async with client.post("/v1/completions", data=b"{}", headers=headers) as response:
                error = await refused(response, 400)
            assert error["message"].startswith("body: expected it whole")

    run(main())


def test_far_too_many_token_ids_are_refused_before_they_are_looked_at() -> None:
    async def main() -> None:
        async with serving(EchoCluster()) as client:
            body = {"prompt": [1] * 100_000 + ["not a token"]}
            async with client.post("/v1/completions", json=body) as response:
                error = await refused(response, 400)
            assert "tokens, got '100001 tokens'" in error["message"]

    run(main())
