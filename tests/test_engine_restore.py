"""KV that came back from host memory: exact, partial blocks too; wrong bytes are misses."""

from dataclasses import replace

import pytest

from evolving_infra.config import EngineConfig
from evolving_infra.engine.request import Admitted, BlocksAdded, BlocksFilled
from evolving_infra.ops.host_blocks import MISSING_SLOT
from tests.test_engine_rig import GQA, SMALL, Rig, alone, prompt_of

both = pytest.mark.parametrize("config", [SMALL, GQA], ids=["mla", "gqa"])


def restored_run(
    rig: Rig, prompt: tuple[int, ...], max_tokens: int = 8
) -> tuple[Admitted, tuple[int, ...]]:
    """Fill host memory, empty the prefix cache, run again from host memory alone."""
    rig.submit("fill", prompt, max_tokens)
    rig.run()
    rig.engine.flush()
    rig.submit("again", prompt, max_tokens, ready=False)
    keys = rig.hasher.chain(prompt)
    assert rig.engine.ready("again", rig.host_blocks(keys), 0, 1.0)
    rig.run()
    admitted = rig.of(Admitted)[-1]
    return admitted, rig.output("again")


@both
@pytest.mark.parametrize("tokens", [17, 96, 100], ids=["two blocks", "last one whole", "tail"])
def test_restored_kv_gives_the_tokens_of_recomputed_kv(config: EngineConfig, tokens: int) -> None:
    prompt = prompt_of(tokens, tokens)
    rig = Rig(config)
    admitted, output = restored_run(rig, prompt)
    assert output == alone(config, prompt)
    assert admitted.restored_tokens == (tokens - 1) // 16 * 16
    assert (admitted.l1_tokens, admitted.missed_blocks) == (0, 0)
    assert rig.engine.counters.restored_tokens == admitted.restored_tokens
    rig.check_nothing_leaks()


@both
def test_zeroed_restores_change_the_tokens(config: EngineConfig) -> None:
    """The control: if this did not fail, the tests above would show nothing."""
    inexact = 0
    for seed in range(4):
        prompt = prompt_of(seed, 100)
        admitted, output = restored_run(Rig(config, fault="zero_restore"), prompt)
        assert admitted.restored_tokens == 96
        inexact += output != alone(config, prompt)
    assert inexact == 4


def test_zeroed_restores_are_misses_when_the_pages_are_read_back() -> None:
    config = replace(SMALL, verify="device")
    prompt = prompt_of(1, 100)
    admitted, output = restored_run(Rig(config, fault="zero_restore"), prompt)
    assert (admitted.restored_tokens, admitted.missed_blocks) == (0, 6)
    assert output == alone(SMALL, prompt)


def test_a_damaged_block_ends_what_is_restored() -> None:
    rig, prompt = Rig(), prompt_of(2, 100)
    rig.submit("fill", prompt)
    rig.run()
    rig.engine.flush()
    blocks = rig.host_blocks(rig.hasher.chain(prompt))
    rig.memory[blocks.slots[2, 0], 300] ^= 1
    rig.submit("again", prompt, ready=False)
    rig.engine.ready("again", blocks, 0, 0.0)
    rig.run()
    admitted = rig.of(Admitted)[-1]
    assert (admitted.restored_tokens, admitted.missed_blocks) == (32, 4)
    assert rig.output("again") == alone(SMALL, prompt)


@both
@pytest.mark.parametrize("tokens", [5, 64, 75], ids=["tail only", "no tail", "both"])
def test_hand_off_computes_one_token_and_is_exact(config: EngineConfig, tokens: int) -> None:
    prompt = prompt_of(tokens, tokens)
    prefill, decode = Rig(config), Rig(config)
    first = prefill.prefill(prompt)
    prefill.check_nothing_leaks()
    blocks, tail_tokens = prefill.hand_off_blocks(prompt)
    decode.submit("d", prompt, output=(first,), ready=False)
    decode.engine.ready("d", blocks, tail_tokens, 0.0)
    decode.run()
    assert (first, *decode.output("d")) == alone(config, prompt)
    assert decode.of(Admitted)[0].cached_tokens == tokens
    assert decode.engine.counters.prefill_tokens == 0


def test_a_tail_that_holds_every_token_still_leaves_the_last_one_to_compute() -> None:
    rig, prompt = Rig(), prompt_of(6, 40)
    rig.prefill(prompt)
    rig.engine.flush()
    blocks, tail_tokens = rig.hand_off_blocks(prompt)
    rig.submit("again", prompt, ready=False)
    rig.engine.ready("again", blocks, tail_tokens, 0.0)
    rig.run()
    assert rig.of(Admitted)[-1].restored_tokens == 39
    assert rig.output("again") == alone(SMALL, prompt)


def test_host_blocks_of_a_longer_prompt_are_read_only_as_far_as_they_serve() -> None:
    rig, longer = Rig(), prompt_of(7, 40)
    rig.prefill(longer)
    rig.engine.flush()
    blocks, tail_tokens = rig.hand_off_blocks(longer)
    rig.submit("shorter", longer[:32], ready=False)
    rig.engine.ready("shorter", blocks, tail_tokens, 0.0)
    rig.run()
    admitted = rig.of(Admitted)[-1]
    assert (admitted.restored_tokens, admitted.missed_blocks) == (16, 0)
    assert rig.output("shorter") == alone(SMALL, longer[:32])


def test_hand_off_of_a_damaged_tail_recomputes_the_tail() -> None:
    prompt = prompt_of(3, 75)
    prefill, decode = Rig(), Rig()
    first = prefill.prefill(prompt)
    blocks, tail_tokens = prefill.hand_off_blocks(prompt)
    prefill.memory[blocks.slots[-1, 0], 300] ^= 1
    decode.submit("d", prompt, output=(first,), ready=False)
    decode.engine.ready("d", blocks, tail_tokens, 0.0)
    decode.run()
    assert (first, *decode.output("d")) == alone(SMALL, prompt)
    assert decode.of(Admitted)[0].restored_tokens == 64


def test_the_prefix_cache_comes_before_host_memory() -> None:
    rig, prompt = Rig(), prompt_of(4, 100)
    rig.submit("fill", prompt)
    rig.run()
    blocks = rig.host_blocks(rig.hasher.chain(prompt))
    rig.engine.flush()
    rig.submit("short", prompt[:40])
    rig.run()
    rig.submit("again", prompt, ready=False)
    rig.engine.ready("again", blocks, 0, 0.0)
    rig.run()
    admitted = rig.of(Admitted)[-1]
    assert (admitted.l1_tokens, admitted.restored_tokens) == (32, 64)
    assert rig.output("again") == alone(SMALL, prompt)


def test_restored_blocks_enter_the_prefix_cache_and_are_not_filled_again() -> None:
    rig, prompt = Rig(), prompt_of(5, 100)
    restored_run(rig, prompt, 2)
    filled = [key for event in rig.of(BlocksFilled) for key in event.keys]
    added = [key for event in rig.of(BlocksAdded) for key in event.keys]
    assert filled == list(rig.hasher.chain(prompt))
    assert added == filled * 2


def test_a_gap_in_host_memory_is_bridged_by_the_prefix_cache() -> None:
    """The cache has the first two blocks, host memory only the next three: both serve."""
    prompt = prompt_of(9, 100)
    rig = Rig()
    rig.submit("fill", prompt, 1)
    rig.run()
    blocks = rig.host_blocks(rig.hasher.chain(prompt)[:5])
    slots = blocks.slots.copy()
    slots[:2] = MISSING_SLOT
    rig.engine.flush()
    rig.submit("prefix", prompt[:33], 1)
    rig.run()
    rig.submit("again", prompt, ready=False)
    rig.engine.ready("again", replace(blocks, slots=slots), 0, 1.0)
    rig.run()
    admitted = rig.of(Admitted)[-1]
    assert (admitted.l1_tokens, admitted.restored_tokens) == (32, 48)
    assert rig.output("again") == alone(SMALL, prompt)
    rig.check_nothing_leaks()


def test_host_blocks_behind_a_gap_serve_nobody() -> None:
    prompt = prompt_of(9, 100)
    rig = Rig()
    rig.submit("fill", prompt, 1)
    rig.run()
    blocks = rig.host_blocks(rig.hasher.chain(prompt)[:5])
    slots = blocks.slots.copy()
    slots[1] = MISSING_SLOT
    rig.engine.flush()
    rig.submit("again", prompt, ready=False)
    rig.engine.ready("again", replace(blocks, slots=slots), 0, 1.0)
    rig.run()
    assert rig.of(Admitted)[-1].restored_tokens == 16
    assert rig.output("again") == alone(SMALL, prompt)
