"""Scaling keeps sharing; prompts keep prefixes and contain what the model really said."""

from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evolving_infra.errors import InputError, StateError
from evolving_infra.traces.load import load
from evolving_infra.traces.prompts import PromptBuilder
from evolving_infra.traces.scale import parse_scale, scale
from evolving_infra.traces.workload import (
    Dependency,
    TraceRequest,
    Workload,
    shared_prefix,
)
from evolving_infra.types import BranchKind

EXAMPLES = Path(__file__).parent.parent / "examples"


def request(name: str, tokens: int, blocks: tuple[int, ...], **more) -> TraceRequest:
    fields = {"branch": "main", "output_tokens": 4} | more
    return TraceRequest(request=name, input_tokens=tokens, block_ids=blocks, **fields)


def workload(*requests: TraceRequest, block_size: int | Fraction = 8) -> Workload:
    return Workload(name="w", block_size=block_size, requests=requests)


def fork(name: str, tokens: int, blocks: tuple[int, ...], **more) -> TraceRequest:
    fields = {"branch": "fork", "kind": BranchKind.FORK, "parent_branch": "main"} | more
    return request(name, tokens, blocks, **fields)


@pytest.mark.parametrize(
    ("text", "value"), [("1/32", Fraction(1, 32)), ("0.5", Fraction(1, 2)), ("3", Fraction(3))]
)
def test_scales_are_exact(text, value):
    assert parse_scale(text) == value


@pytest.mark.parametrize("text", ["", "0", "-1", "1/0", "1/2/3", "0.5/2", "nan", "1e3", "1 / 2"])
def test_other_scales_are_refused(text):
    with pytest.raises(InputError, match="a positive number such as 1/32"):
        parse_scale(text)


def test_scaling_shrinks_tokens_and_time():
    needed = Dependency(request="a", delay=40.0)
    made = workload(
        request("a", 70, (1, 2, 3, 4, 5, 6, 7, 8), recorded_seconds=3.0, not_before=5.0),
        request("b", 100, (1, 2), dependencies=(needed,), output_tokens=0),
    )
    small = scale(made, Fraction(1, 4), Fraction(1, 10), max_wait=3.5)
    assert small.block_size == 2
    first, second = small.requests
    assert (first.input_tokens, first.output_tokens) == (17, 1)
    assert (first.not_before, first.recorded_seconds) == (0.5, 0.3)
    assert (second.input_tokens, second.output_tokens) == (25, 1)
    assert second.dependencies[0].delay == 3.5
    assert scale(made, time=Fraction(1, 10)).requests[1].dependencies[0].delay == 4.0


@pytest.mark.parametrize("denominator", range(1, 6))
def test_the_end_of_an_answer_stays_where_the_next_prompt_expects_it(denominator):
    made = workload(request("a", 5, (), output_tokens=5), request("b", 10, (1,)))
    first, second = scale(made, Fraction(1, denominator)).requests
    assert first.input_tokens + first.output_tokens == second.input_tokens


@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.lists(st.integers(1, 3), min_size=1, max_size=6),
    st.integers(0, 6),
)
def test_a_shared_prefix_of_ids_is_a_shared_prefix_of_tokens(numerator, denominator, forks, kept):
    base = tuple(range(1, 7))
    requests = [request("r", 48, base)]
    for index, length in enumerate(forks):
        own = tuple(100 * (index + 1) + step for step in range(length))
        ids = base[: kept + index] + own
        requests.append(request(f"r{index}", 8 * len(ids) + index, ids, version=index + 1))
    small = scale(workload(*requests), Fraction(numerator, denominator))
    builder = PromptBuilder(small)
    prompts = {}
    for item in small.requests:
        prompts[item.request] = builder.prompt(item.request)
        builder.answered(item.request, [256] * item.output_tokens)
        assert len(prompts[item.request]) == item.input_tokens
    for left in small.requests:
        for right in small.requests:
            blocks = shared_prefix(left.block_ids, right.block_ids)
            shared = int(blocks * Fraction(small.block_size))
            shared = min(shared, left.input_tokens, right.input_tokens)
            assert prompts[left.request][:shared] == prompts[right.request][:shared]


def test_tokens_depend_on_name_lap_and_block_only():
    made = workload(request("a", 19, (1, 2)))
    prompt = PromptBuilder(made).prompt("a")
    assert prompt == PromptBuilder(made).prompt("a")
    assert all(0 <= token < 256 for token in prompt)
    assert len(set(prompt)) > 10
    assert prompt[:8] != PromptBuilder(made, lap=1).prompt("a")[:8]
    other = Workload(name="other", block_size=8, requests=made.requests)
    assert prompt[:8] != PromptBuilder(other).prompt("a")[:8]


def test_a_continuation_contains_the_real_answer():
    made = workload(request("a", 19, (1, 2)), request("b", 37, (1, 2, 3, 4)))
    builder = PromptBuilder(made)
    first = builder.prompt("a")
    builder.answered("a", [301, 302, 303, 304])
    second = builder.prompt("b")
    assert second[:23] == (*first, 301, 302, 303, 304)
    assert len(second) == 37


def test_an_answer_is_cut_where_the_next_prompt_ends():
    builder = PromptBuilder(workload(request("a", 19, (1, 2)), request("b", 21, (1, 2))))
    first = builder.prompt("a")
    builder.answered("a", [301, 302, 303, 304])
    assert builder.prompt("b") == (*first, 301, 302)


def test_an_answer_stays_in_later_prompts():
    builder = PromptBuilder(
        workload(
            request("a", 19, (1, 2)),
            request("b", 37, (1, 2, 3, 4)),
            request("c", 60, (1, 2, 3, 4, 5, 6, 7)),
        )
    )
    builder.prompt("a")
    builder.answered("a", [301, 302, 303, 304])
    second = builder.prompt("b")
    builder.answered("b", [310])
    assert builder.prompt("c")[:38] == (*second, 310)


def test_a_compaction_keeps_only_the_shared_prefix():
    builder = PromptBuilder(
        workload(request("a", 19, (1, 2)), request("b", 37, (1, 7, 8, 9), version=1))
    )
    first = builder.prompt("a")
    builder.answered("a", [301, 302, 303, 304])
    second = builder.prompt("b")
    assert second[:8] == first[:8]
    assert second[8:16] != first[8:16]
    assert max(second) < 256


def test_a_compaction_keeps_answers_in_blocks_it_shares():
    builder = PromptBuilder(
        workload(
            request("a", 19, (1, 2)),
            request("b", 37, (1, 2, 3, 4)),
            request("c", 50, (1, 2, 3, 9, 10), version=1),
        )
    )
    first = builder.prompt("a")
    builder.answered("a", [301, 302, 303, 304])
    builder.prompt("b")
    builder.answered("b", [310])
    assert builder.prompt("c")[:23] == (*first, 301, 302, 303, 304)
    assert builder.prompt("c")[24:32] != builder.prompt("b")[24:32]
    assert 310 not in builder.prompt("c")


def test_a_new_version_continues_nothing_past_its_blocks():
    builder = PromptBuilder(
        workload(request("a", 19, (1, 2)), request("b", 37, (1, 2, 3, 4), version=1))
    )
    first = builder.prompt("a")
    builder.answered("a", [301, 302, 303, 304])
    assert builder.prompt("b")[:16] == first[:16]
    assert max(builder.prompt("b")) < 256


def test_forks_inherit_the_answer_and_siblings_agree():
    builder = PromptBuilder(
        workload(
            request("a", 19, (1, 2)),
            request("b", 37, (1, 2, 3, 4)),
            fork("f", 30, (1, 2, 3)),
            fork("g", 30, (1, 2, 3), branch="fork2"),
        )
    )
    first = builder.prompt("a")
    builder.answered("a", [301, 302, 303, 304])
    spliced = (*first, 301, 302, 303, 304)
    assert builder.prompt("b")[:23] == spliced
    assert builder.prompt("f")[:24] == builder.prompt("g")[:24] == builder.prompt("b")[:24]


def test_a_subagent_inherits_nothing():
    builder = PromptBuilder(
        workload(
            request("a", 19, (1, 2)),
            fork("s", 30, (8, 9), branch="sub", kind=BranchKind.SUBAGENT),
        )
    )
    builder.prompt("a")
    builder.answered("a", [301, 302, 303, 304])
    assert max(builder.prompt("s")) < 256


def test_without_an_answer_the_trace_fills_in():
    made = workload(request("a", 19, (1, 2)), request("b", 37, (1, 2, 3, 4)))
    builder = PromptBuilder(made)
    first = builder.prompt("a")
    second = builder.prompt("b")
    assert second[:19] == first
    assert max(second) < 256
    builder.answered("a", [301])
    assert builder.prompt("b") == second


def test_mistakes_are_refused():
    builder = PromptBuilder(workload(request("a", 19, (1, 2))))
    with pytest.raises(InputError, match="request: expected one of w, got 'z'"):
        builder.prompt("z")
    with pytest.raises(StateError, match="answered before its prompt was built"):
        builder.answered("a", [1])


def test_a_real_trace_reuses_what_decode_produced():
    small = scale(load(EXAMPLES / "trace_0291.jsonl"), Fraction(1, 32))
    builder = PromptBuilder(small)
    previous: dict[str, TraceRequest] = {}
    spliced = appended = 0
    for item in small.requests:
        prompt = builder.prompt(item.request)
        assert len(prompt) == item.input_tokens
        before = previous.get(item.branch)
        if before is not None and before.version == item.version:
            appended += 1
            end = before.input_tokens + before.output_tokens
            said = prompt[before.input_tokens : end]
            spliced += set(said) == {256}
            assert prompt[: before.input_tokens] == builder.prompt(before.request)
        builder.answered(item.request, [256] * item.output_tokens)
        previous[item.branch] = item
    assert appended > 20
    assert spliced == appended
