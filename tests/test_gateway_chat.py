"""POST /v1/chat/completions and the models routes, through the real OpenAI client."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar

import openai
import pytest
from openai import AsyncOpenAI

from evolving_infra.errors import StateError
from evolving_infra.gateway.tokenizer import IM_END, chat_tokens
from tests.test_gateway_fake import SETTINGS, EchoCluster, listening, run, serving

T = TypeVar("T")
HELLO: Any = [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]


def with_client(
    use: Callable[[AsyncOpenAI], Awaitable[T]], cluster: EchoCluster | None = None
) -> T:
    """Run ``use`` with a client of a fresh gateway; the client never retries."""

    async def main() -> T:
        async with (
            listening(cluster or EchoCluster()) as server,
            AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
        ):
            return await use(client)

    return run(main())


def test_whole_answer() -> None:
    cluster = EchoCluster()

    async def use(client: AsyncOpenAI) -> Any:
        return await client.chat.completions.create(
            model="echo", messages=HELLO, max_completion_tokens=9
        )

    answer = with_client(use, cluster)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "system\nb")
    assert choice.finish_reason == "length"
    assert answer.object == "chat.completion"
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert answer.usage.total_tokens == len(cluster.submissions[0].tokens) + 9
    assert answer._request_id == answer.id == cluster.submissions[0].request
    assert cluster.submissions[0].tokens == tuple(chat_tokens([("system", "be"), ("user", "hi")]))


def test_stream() -> None:
    async def use(client: AsyncOpenAI) -> list[Any]:
        stream = await client.chat.completions.create(
            model="default",
            messages=HELLO,
            max_tokens=9,
            stream=True,
            stream_options={"include_usage": True},
        )
        return [chunk async for chunk in stream]

    first, *parts, last, usage = with_client(use)
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert "".join(part.choices[0].delta.content for part in parts) == "system\nb"
    assert (last.choices[0].delta.content, last.choices[0].finish_reason) == (None, "length")
    assert (usage.choices, usage.usage.completion_tokens) == ([], 9)
    assert {chunk.object for chunk in (first, last)} == {"chat.completion.chunk"}


def test_the_end_of_the_turn_stops_the_answer() -> None:
    async def use(client: AsyncOpenAI) -> Any:
        return await client.chat.completions.create(model="echo", messages=HELLO)

    cluster = EchoCluster()
    answer = with_client(use, cluster)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (
        "system\nbe",
        "stop",
    )
    assert cluster.submissions[0].sampling.stop_token_ids == (IM_END,)


def test_ignore_eos_goes_on_to_the_limit() -> None:
    async def use(client: AsyncOpenAI) -> Any:
        return await client.chat.completions.create(
            model="echo", messages=HELLO, max_tokens=40, extra_body={"ignore_eos": True}
        )

    assert with_client(use).choices[0].finish_reason == "length"


def test_token_ids_and_timings() -> None:
    async def use(client: AsyncOpenAI) -> tuple[Any, list[Any]]:
        extra: Any = {"extra_body": {"return_token_ids": True, "return_timings": True}}
        whole = await client.chat.completions.create(
            model="echo", messages=HELLO, max_tokens=3, **extra
        )
        stream = await client.chat.completions.create(
            model="echo", messages=HELLO, max_tokens=3, stream=True, **extra
        )
        return whole, [chunk async for chunk in stream]

    whole, chunks = with_client(use)
    prompt = chat_tokens([("system", "be"), ("user", "hi")])
    assert whole.prompt_token_ids == chunks[0].prompt_token_ids == prompt
    assert whole.choices[0].token_ids == prompt[:3]
    ids = [token for chunk in chunks[1:-1] for token in chunk.choices[0].token_ids]
    assert ids == prompt[:3]
    assert whole.timings == chunks[-1].timings
    assert whole.timings["prefill_node"] == "node0"


def test_text_parts_are_joined() -> None:
    cluster = EchoCluster()
    parts: Any = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]

    async def use(client: AsyncOpenAI) -> Any:
        messages: Any = [{"role": "user", "content": parts}]
        return await client.chat.completions.create(model="echo", messages=messages)

    with_client(use, cluster)
    assert cluster.submissions[0].tokens == tuple(chat_tokens([("user", "ab")]))


def test_default_limit_is_a_setting_and_never_beyond_the_context() -> None:
    cluster = EchoCluster()
    prompt = len(chat_tokens([("user", "hi")]))

    async def main() -> None:
        for settings in (
            replace(SETTINGS, chat_tokens=7),
            replace(SETTINGS, chat_tokens=7, max_context_tokens=prompt + 5),
        ):
            async with serving(cluster, settings) as client:
                body = {"messages": [{"role": "user", "content": "hi"}]}
                await client.post("/v1/chat/completions", json=body)

    run(main())
    assert [one.sampling.max_tokens for one in cluster.submissions] == [7, 5]


def test_completions_through_the_client() -> None:
    async def use(client: AsyncOpenAI) -> tuple[Any, str]:
        whole = await client.completions.create(model="echo", prompt="ab", max_tokens=3)
        stream = await client.completions.create(
            model="echo", prompt="ab", max_tokens=3, stream=True
        )
        return whole, "".join([chunk.choices[0].text async for chunk in stream])

    whole, streamed = with_client(use)
    assert whole.choices[0].text == streamed == "aba"


def test_models() -> None:
    async def use(client: AsyncOpenAI) -> tuple[list[str], Any]:
        listed = [model.id async for model in client.models.list()]
        return listed, await client.models.retrieve("echo")

    listed, model = with_client(use)
    assert listed == ["echo"]
    assert (model.id, model.object, model.max_model_len) == ("echo", "model", 200)


def test_an_unknown_model_is_not_found() -> None:
    async def use(client: AsyncOpenAI) -> list[Any]:
        errors = []
        for call in (
            client.chat.completions.create(model="other", messages=HELLO),
            client.completions.create(model="other", prompt="a"),
            client.models.retrieve("a/b"),
        ):
            with pytest.raises(openai.NotFoundError) as caught:
                await call
            errors.append(caught.value)
        return errors

    for error in with_client(use):
        assert (error.code, error.param) == ("model_not_found", "model")
        assert "expected echo or default, got" in str(error)


def test_the_client_sees_the_sentence_of_a_bad_request() -> None:
    async def use(client: AsyncOpenAI) -> None:
        await client.chat.completions.create(model="echo", messages=HELLO, max_tokens=-1)

    with pytest.raises(openai.BadRequestError) as caught:
        with_client(use)
    assert caught.value.param == "max_tokens"
    assert "max_tokens: expected an integer from 1 to 200, got -1" in str(caught.value)


def test_an_error_in_the_middle_of_a_stream_reaches_the_client() -> None:
    cluster = EchoCluster(fail_after=(2, StateError("the node is gone")))
    seen = []

    async def use(client: AsyncOpenAI) -> None:
        stream = await client.completions.create(model="echo", prompt="abc", stream=True)
        async for chunk in stream:
            seen.append(chunk.choices[0].text)

    with pytest.raises(openai.APIError, match="the node is gone"):
        with_client(use, cluster)
    assert seen == ["a", "b"]
