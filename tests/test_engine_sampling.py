"""Picking tokens: greedy, seeded, top-p; ends; the same wherever the token is picked."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evolving_infra.engine.request import TokensOut
from evolving_infra.engine.sampling import pick, uniform
from evolving_infra.types import EOS_TOKEN, VOCAB_USED, SamplingParams
from tests.test_engine_rig import SMALL, Rig, alone, prompt_of

GREEDY = SamplingParams(max_tokens=8)


def logits_of(values: dict[int, float], rest: float = -5.0) -> np.ndarray:
    row = np.full(320, rest, np.float32)
    for token, value in values.items():
        row[token] = value
    return row


def test_greedy_takes_the_largest_and_the_lowest_id_of_a_tie() -> None:
    assert pick(logits_of({3: 1.0, 200: 2.0}), GREEDY, 0) == 200
    assert pick(logits_of({250: 2.0, 9: 2.0}), GREEDY, 0) == 9


@given(st.integers(0, 2**64 - 1), st.integers(0, 10_000), st.sampled_from([0.0, 0.5, 3.0]))
def test_padding_is_never_picked(seed: int, position: int, temperature: float) -> None:
    row = logits_of({260: 99.0, 319: 99.0}, rest=0.0)
    sampling = SamplingParams(max_tokens=1, temperature=temperature, seed=seed)
    assert 0 <= pick(row, sampling, position) < VOCAB_USED


def test_sampled_tokens_follow_the_distribution() -> None:
    row = logits_of({1: 2.0, 2: 1.0, 3: 0.0}, rest=-80.0)
    sampling = SamplingParams(max_tokens=1, temperature=1.0, seed=5)
    counts = np.bincount([pick(row, sampling, position) for position in range(4000)], minlength=4)
    expected = np.exp([2.0, 1.0, 0.0]) / np.exp([2.0, 1.0, 0.0]).sum()
    # four standard deviations of a binomial share over 4,000 draws
    assert np.abs(counts[1:4] / 4000 - expected).max() < 4 * 0.5 / 4000**0.5


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    row = logits_of({1: 2.0, 2: 1.0, 3: 0.0}, rest=-80.0)
    for top_p, kept in ((0.5, {1}), (0.7, {1, 2}), (1.0, {1, 2, 3})):
        sampling = SamplingParams(max_tokens=1, temperature=1.0, top_p=top_p)
        assert {pick(row, sampling, position) for position in range(300)} == kept


def test_a_low_temperature_is_nearly_greedy() -> None:
    row = logits_of({7: 1.0, 8: 0.9})
    sampling = SamplingParams(max_tokens=1, temperature=0.001)
    assert {pick(row, sampling, position) for position in range(100)} == {7}


def test_the_counter_spreads_over_seeds_and_positions() -> None:
    draws = np.array([[uniform(seed, position) for position in range(64)] for seed in range(64)])
    assert len(np.unique(draws)) == 64 * 64
    assert draws.min() >= 0
    assert draws.max() < 1
    # standard error of a mean of 64 uniforms is 0.036
    assert np.abs(draws.mean(0) - 0.5).max() < 0.18
    assert np.abs(draws.mean(1) - 0.5).max() < 0.18


def sampled(seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=12, temperature=1.0, top_p=0.95, seed=seed, ignore_eos=True)


def test_seeded_sampling_repeats_beside_others_and_after_a_hand_off() -> None:
    prompt = prompt_of(1, 60)
    rig = Rig()
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        rig.submit(name, prompt, sampling=sampled(seed))
    rig.run()
    assert rig.output("a") == rig.output("b")
    assert rig.output("a") != rig.output("c")
    later = Rig()
    later.submit("rest", prompt, output=rig.output("a")[:5], sampling=sampled(1))
    later.run()
    assert later.output("rest") == rig.output("a")[5:]


def finishes(rig: Rig) -> list[str]:
    found = [event.finish for event in rig.of(TokensOut)]
    assert None not in found[-1:]
    return [finish for finish in found if finish is not None]


def test_max_tokens_counts_what_was_generated_elsewhere() -> None:
    rig = Rig()
    rig.submit("r", prompt_of(1, 20), 8, output=(1, 2, 3))
    rig.run()
    assert len(rig.output("r")) == 5
    assert finishes(rig) == ["length"]


def test_a_stop_token_ends_the_request_and_is_its_last_token() -> None:
    prompt = prompt_of(2, 30)
    stop = alone(SMALL, prompt)[3]
    sampling = SamplingParams(max_tokens=8, ignore_eos=True, stop_token_ids=(stop,))
    rig = Rig()
    rig.submit("r", prompt, sampling=sampling)
    rig.run()
    assert rig.output("r")[-1] == stop
    assert stop not in rig.output("r")[:-1]
    assert finishes(rig) == ["stop"]


@pytest.mark.parametrize("ignore", [False, True])
def test_the_end_token_ends_the_request_unless_ignored(
    ignore: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evolving_infra.engine.engine.pick", lambda *_: EOS_TOKEN)
    rig = Rig()
    rig.submit("r", (1, 2, 3), sampling=SamplingParams(max_tokens=4, ignore_eos=ignore))
    rig.run()
    assert rig.output("r") == (EOS_TOKEN,) * (4 if ignore else 1)
    assert finishes(rig) == ["length" if ignore else "stop"]
    rig.check_nothing_leaks()
