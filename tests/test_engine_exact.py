"""Tokens do not depend on batch mates, chunks, page size, ranks, reuse or preemption."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evolving_infra.config import EngineConfig
from evolving_infra.engine.model import Model, Segment, device_pools
from evolving_infra.engine.request import Admitted, Preempted
from tests.test_engine_rig import GQA, SMALL, Rig, alone, prompt_of

SLOW = settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
both = pytest.mark.parametrize("config", [SMALL, GQA], ids=["mla", "gqa"])


@both
@SLOW
@given(data=st.data())
def test_logits_and_kv_do_not_depend_on_how_a_prompt_is_cut(
    config: EngineConfig, data: st.DataObject
) -> None:
    """Bits, not only tokens: any chunks, any mates in any order."""
    model = Model(config)
    length = data.draw(st.integers(1, 150), label="length")
    prompt = prompt_of(data.draw(st.integers(0, 99)), length)
    pages = tuple(range(10))
    whole, cut = (device_pools(config.layout, 40, model.device) for _ in range(2))
    expected = model.forward((Segment(tokens=prompt, first_position=0, pages=pages),), whole)[0]
    cuts = sorted({*data.draw(st.lists(st.integers(1, length), max_size=5), label="cuts"), length})
    first = 0
    for end in cuts:
        mine = Segment(tokens=prompt[first:end], first_position=first, pages=pages)
        count = data.draw(st.integers(0, 2), label="mates")
        mates = [
            Segment(
                tokens=prompt_of(mate + 7, 1 + 13 * mate),
                first_position=0,
                pages=tuple(range(10 + 10 * mate, 20 + 10 * mate)),
            )
            for mate in range(count)
        ]
        place = data.draw(st.integers(0, count), label="place")
        segments = (*mates[:place], mine, *mates[place:])
        got = model.forward(segments, cut)[place]
        first = end
    assert torch.equal(expected, got)
    rows = [pool.view(-1, pool.shape[2])[:length] for rank in whole for pool in rank]
    others = [pool.view(-1, pool.shape[2])[:length] for rank in cut for pool in rank]
    assert all(torch.equal(a, b) for a, b in zip(rows, others, strict=True))


@both
def test_tokens_do_not_depend_on_page_size_ranks_or_chunks(config: EngineConfig) -> None:
    prompt = prompt_of(3, 130)
    expected = alone(config, prompt)
    for page_size, tp_size, chunk in ((16, 1, 512), (32, 2, 33), (64, 1, 7), (64, 2, 100)):
        other = replace(config, page_size=page_size, tp_size=tp_size, chunk_tokens=chunk)
        assert alone(other, prompt) == expected, (page_size, tp_size, chunk)


@both
@settings(SLOW, max_examples=6)
@given(
    lengths=st.lists(st.integers(1, 140), min_size=2, max_size=5),
    shared=st.integers(0, 90),
    chunk=st.sampled_from((5, 48, 256)),
)
def test_tokens_do_not_depend_on_batch_mates_or_a_shared_prefix(
    config: EngineConfig, lengths: list[int], shared: int, chunk: int
) -> None:
    prefix = prompt_of(1, shared)
    prompts = [prefix + prompt_of(10 + i, length) for i, length in enumerate(lengths)]
    rig = Rig(replace(config, chunk_tokens=chunk, max_running=3))
    for i, prompt in enumerate(prompts):
        rig.submit(f"r{i}", prompt, 4)
        rig.step()
    rig.run()
    for i, prompt in enumerate(prompts):
        assert rig.output(f"r{i}") == alone(config, prompt, 4)
    rig.check_nothing_leaks()


@both
def test_reused_kv_gives_the_tokens_of_recomputed_kv(config: EngineConfig) -> None:
    rig = Rig(config)
    turn = prompt_of(5, 100)
    rig.submit("first", turn, 30)
    rig.run()
    longer = (*turn, *rig.output("first"), *prompt_of(6, 20))
    rig.submit("second", longer)
    rig.run()
    admitted = rig.of(Admitted)[-1]
    assert admitted.l1_tokens == 129 // 16 * 16  # the last output token has no KV
    assert rig.output("second") == alone(config, longer)


def test_a_repeated_prompt_computes_at_least_its_last_token() -> None:
    rig = Rig()
    for name in ("one", "two"):
        rig.submit(name, prompt_of(8, 64))
        rig.run()
    assert rig.output("one") == rig.output("two")
    assert [event.l1_tokens for event in rig.of(Admitted)] == [0, 48]


@both
def test_preempted_requests_give_the_same_tokens(config: EngineConfig) -> None:
    tight = replace(config, device_pages=20, max_context_tokens=320)
    prompts = [prompt_of(20 + i, 80) for i in range(3)]
    rig = Rig(tight)
    for i, prompt in enumerate(prompts):
        rig.submit(f"r{i}", prompt, 60)
    rig.run()
    assert rig.of(Preempted)
    assert rig.engine.counters.preemptions == len(rig.of(Preempted))
    for i, prompt in enumerate(prompts):
        assert rig.output(f"r{i}") == alone(config, prompt, 60)
    assert len(rig.of(Admitted)) == 3
    rig.check_nothing_leaks()


def test_float32_kv_is_exact_too() -> None:
    config = replace(SMALL, kv_dtype="float32")
    prompt = prompt_of(2, 90)
    assert alone(config, prompt) == alone(replace(config, chunk_tokens=11, tp_size=1), prompt)
