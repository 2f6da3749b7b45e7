"""Admission order, readiness, exposed time, shared prefixes, aborts, limits, measurements."""

from dataclasses import replace
from typing import Any

import pytest

from evolving_infra.engine.request import (
    Admitted,
    BlocksAdded,
    BlocksFilled,
    Failed,
    Measured,
    PrefillDone,
    TokensOut,
)
from evolving_infra.errors import InputError, StateError
from evolving_infra.types import SamplingParams
from tests.test_engine_rig import SMALL, Rig, prompt_of


def admitted(rig: Rig) -> list[str]:
    return [event.request for event in rig.of(Admitted)]


def test_admission_is_in_order_and_skips_those_not_ready() -> None:
    rig = Rig(replace(SMALL, max_running=1))
    rig.submit("slow", prompt_of(1, 20), ready=False)
    for name in ("a", "b"):
        rig.submit(name, prompt_of(2, 20))
    rig.step()
    rig.engine.ready("slow", None, 0, 1.0)
    rig.run()
    assert admitted(rig) == ["a", "slow", "b"]


def test_a_small_request_does_not_pass_a_large_one_that_waits_for_pages() -> None:
    rig = Rig(replace(SMALL, device_pages=12, max_context_tokens=192))
    for name, tokens in (("running", 110), ("large", 100), ("small", 10)):
        rig.submit(name, prompt_of(tokens, tokens), 3)
    rig.run()
    assert admitted(rig) == ["running", "large", "small"]
    ends = [event.request for event in rig.of(TokensOut) if event.finish]
    assert ends[0] == "running"


def test_exposed_time_counts_from_when_the_request_could_have_started() -> None:
    rig = Rig(replace(SMALL, max_running=1))
    rig.submit("first", prompt_of(1, 20), 2)
    rig.submit("late", prompt_of(2, 20), ready=False, now=1.0)
    rig.step(2.0)
    rig.step(3.0)  # first finishes in this step
    rig.step(5.0)  # the engine is free from here on
    assert not rig.engine.has_work
    assert rig.engine.idle_reason == "its fetch is still running"
    rig.engine.ready("late", None, 0, 8.0)
    rig.step(8.5)
    event = rig.of(Admitted)[-1]
    assert (event.request, event.queue_wait, event.exposed) == ("late", 7.5, 3.0)


def test_a_fetch_that_ends_while_the_engine_is_full_is_not_exposed() -> None:
    rig = Rig(replace(SMALL, max_running=1))
    rig.submit("first", prompt_of(1, 20), 4)
    rig.submit("late", prompt_of(2, 20), ready=False, now=1.0)
    rig.step(2.0)
    rig.engine.ready("late", None, 0, 3.0)
    while rig.engine.has_work:
        rig.step(9.0)
    event = rig.of(Admitted)[-1]
    assert (event.request, event.queue_wait, event.exposed) == ("late", 8.0, 0.0)


def test_withdraw_takes_only_what_has_not_started() -> None:
    rig = Rig(replace(SMALL, max_running=1))
    rig.submit("running", prompt_of(1, 20))
    rig.submit("waiting", prompt_of(2, 20), ready=False)
    rig.step()
    assert not rig.engine.withdraw("running")
    assert rig.engine.withdraw("waiting")
    assert not rig.engine.withdraw("waiting")
    assert not rig.engine.ready("waiting", None, 0, 0.0)
    rig.run()
    assert admitted(rig) == ["running"]
    assert len(rig.output("running")) == 8


def test_a_preempted_request_can_not_be_withdrawn() -> None:
    rig = Rig(replace(SMALL, device_pages=12, max_context_tokens=192))
    rig.submit("old", prompt_of(1, 80), 60)
    rig.submit("new", prompt_of(2, 64), 60)
    while not rig.engine.counters.preemptions:
        rig.step()
    assert rig.engine.counters.queued == 1
    assert not rig.engine.withdraw("new")
    rig.run()
    assert len(rig.output("new")) == 60


def test_a_preempted_request_goes_on_before_those_that_never_started() -> None:
    rig = Rig(replace(SMALL, device_pages=12, max_context_tokens=192, max_running=2))
    rig.submit("old", prompt_of(1, 80), 60)
    rig.submit("new", prompt_of(2, 64), 60)
    rig.submit("third", prompt_of(3, 150), 2)
    rig.run()
    assert rig.engine.counters.preemptions == 1
    ends = [event.request for event in rig.of(TokensOut) if event.finish]
    assert ends == ["old", "new", "third"]


def test_a_newcomer_waits_until_those_that_run_can_grow() -> None:
    """Of twelve pages the first needs five, soon six: a second with seven would be preempted."""
    rig = Rig(replace(SMALL, device_pages=12, max_context_tokens=192))
    rig.submit("first", prompt_of(1, 78), 16)
    rig.submit("second", prompt_of(2, 112), 4)
    rig.run()
    assert rig.engine.counters.preemptions == 0
    assert len(rig.output("second")) == 4


def test_abort_frees_pages_at_any_time() -> None:
    rig = Rig(replace(SMALL, max_running=1))
    for name in ("prefilling", "queued"):
        rig.submit(name, prompt_of(len(name), 200))
    rig.step()
    assert rig.engine.abort("prefilling")
    assert rig.engine.abort("queued")
    assert not rig.engine.abort("queued")
    rig.submit("decoding", prompt_of(1, 20))
    rig.step()
    rig.step()
    assert rig.engine.abort("decoding")
    rig.run()
    assert len(rig.output("decoding")) == 2
    rig.check_nothing_leaks()


def test_a_shared_prefix_is_computed_once() -> None:
    rig = Rig()
    prefix = prompt_of(1, 160)
    for i in range(3):
        rig.submit(f"r{i}", (*prefix, *prompt_of(10 + i, 9)))
    rig.run()
    assert rig.engine.counters.prefill_tokens == 169 + 2 * 9
    assert rig.engine.counters.l1_tokens == 2 * 160


def test_those_behind_may_pass_one_that_waits_for_a_shared_prefix() -> None:
    rig = Rig()
    prefix = prompt_of(1, 160)
    rig.submit("leader", (*prefix, 1))
    rig.submit("follower", (*prefix, 2))
    rig.submit("other", prompt_of(2, 20))
    rig.step()
    assert admitted(rig) == ["leader", "other"]
    rig.engine.abort("leader")
    rig.step()
    assert admitted(rig)[-1] == "follower"
    rig.run()
    assert len(rig.output("follower")) == 8


def test_an_iteration_is_all_decodes_and_chunks_up_to_the_budget() -> None:
    rig = Rig()
    rig.submit("decoding", prompt_of(1, 20))
    rig.step()
    rig.submit("a", prompt_of(2, 40))
    rig.submit("b", prompt_of(3, 100))
    rig.step()
    pairs = 40 * 41 // 2 + 24 * 25 // 2
    assert rig.engine.measured == Measured(
        uncached_tokens=64, pairs=pairs, restored_tokens=0, running=1, context_tokens=21
    )
    rig.step()
    measured = rig.engine.measured
    assert measured == Measured(
        uncached_tokens=64,
        pairs=64 * 24 + 64 * 65 // 2,
        restored_tokens=0,
        running=2,
        context_tokens=22 + 41,
    )


def test_a_prefill_node_hands_over_after_one_token() -> None:
    rig, prompt = Rig(), prompt_of(1, 40)
    rig.submit("p", prompt, stop_after_first=True)
    rig.run()
    kinds = [type(event) for event in rig.events]
    assert kinds == [Admitted, BlocksFilled, BlocksFilled, TokensOut, PrefillDone, BlocksAdded]
    tail = rig.events[2]
    assert isinstance(tail, BlocksFilled)
    assert tail.token_counts == (8,)
    assert rig.engine.counters.running == 0
    assert len(rig.output("p")) == 1


def test_a_prefill_node_finishes_a_request_of_one_token() -> None:
    rig = Rig()
    rig.submit("p", prompt_of(1, 40), max_tokens=1, stop_after_first=True)
    rig.run()
    assert rig.of(PrefillDone) == []
    assert rig.of(TokensOut)[0].finish == "length"


def test_decoded_blocks_are_filled_as_they_complete() -> None:
    rig = Rig()
    rig.submit("r", prompt_of(1, 20), 40)
    rig.run()
    filled = [key for event in rig.of(BlocksFilled) for key in event.keys]
    tokens = (*prompt_of(1, 20), *rig.output("r"))
    assert filled == list(rig.hasher.chain(tokens[:-1]))


def test_pages_stay_until_they_are_released() -> None:
    """With copies that never end the engine stalls and says so; it goes on when they do."""
    rig = Rig(replace(SMALL, device_pages=12, max_context_tokens=192), copies=False)
    rig.submit("one", prompt_of(1, 150), 2)
    rig.run()
    rig.submit("two", prompt_of(2, 150), 2)
    rig.run()
    assert admitted(rig) == ["one"]
    assert rig.engine.idle_reason == "device pages are short or pinned"
    assert rig.engine.flush() == ()
    assert rig.engine.counters.held_pages == 9
    for event in rig.of(BlocksFilled):
        rig.engine.release(event.pages)
    rig.run()
    assert admitted(rig) == ["one", "two"]


def test_a_decode_without_a_page_waits_for_copies() -> None:
    rig = Rig(replace(SMALL, device_pages=12, max_context_tokens=192), copies=False)
    rig.submit("gone", prompt_of(1, 64), 1)
    rig.run()
    rig.submit("r", prompt_of(2, 120), 60)
    rig.run()
    assert rig.engine.idle_reason == "device pages are pinned by copies"
    assert rig.engine.measured is None
    held = [event for event in rig.of(BlocksFilled) if event.request == "gone"]
    for event in held:
        rig.engine.release(event.pages)
    rig.run()
    assert len(rig.output("r")) == 60


def test_a_request_that_never_fits_fails_with_a_sentence() -> None:
    rig = Rig()
    rig.submit("big", prompt_of(1, 500), 13)
    rig.submit("fits", prompt_of(2, 500), 12)
    rig.run()
    (failed,) = rig.of(Failed)
    assert failed.text == "prompt and max_tokens need a context of 513 tokens, the limit is 512"
    assert len(rig.output("fits")) == 12


@pytest.mark.parametrize(
    ("prompt", "changes", "text"),
    [
        ((), {}, "prompt: expected at least one token"),
        ((1, 260), {}, "prompt: expected token ids in"),
        ((-1,), {}, "prompt: expected token ids in"),
        ((1,), {"max_tokens": 0}, "max_tokens: expected more than 0, got 0"),
        ((1,), {"temperature": -1.0}, "temperature: expected 0 or more"),
        ((1,), {"temperature": float("nan")}, "temperature: expected 0 or more"),
        ((1,), {"top_p": 0.0}, "top_p: expected a number in"),
    ],
)
def test_bad_requests_are_refused(
    prompt: tuple[int, ...], changes: dict[str, Any], text: str
) -> None:
    rig = Rig()
    sampling = replace(SamplingParams(max_tokens=4), **changes)
    with pytest.raises(InputError, match=text):
        rig.submit("r", prompt, sampling=sampling)
    assert not rig.engine.has_work


def test_calls_out_of_order_are_refused() -> None:
    rig = Rig()
    rig.submit("r", (1, 2))
    with pytest.raises(StateError, match="is here already"):
        rig.submit("r", (1, 2))
    with pytest.raises(StateError, match="is ready already"):
        rig.engine.ready("r", None, 0, 0.0)
    rig.submit("s", (1, 2), ready=False)
    with pytest.raises(InputError, match="tail_tokens: expected 0 to 15, got 16"):
        rig.engine.ready("s", None, 16, 0.0)


def test_a_prefill_node_fills_what_it_found_in_its_cache_too() -> None:
    """Its host pool may lack these blocks, and the decode node is served from there."""
    rig, prompt = Rig(), prompt_of(3, 100)
    rig.submit("before", prompt, 1)
    rig.run()
    rig.events.clear()
    rig.prefill(prompt)
    filled = [key for event in rig.of(BlocksFilled) for key in event.keys]
    assert filled[:6] == list(rig.hasher.chain(prompt))
    assert rig.of(Admitted)[0].l1_tokens == 96
    rig.check_nothing_leaks()
