"""The iteration-time models on synthetic nodes of known coefficients."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evolving_infra.control.iteration_time import (
    DEFAULT_PREFILL,
    DRIFT_WINDOWS,
    MIN_WINDOWS,
    WARM_UP_WINDOWS,
    FittedTime,
    IterationTimes,
    check_amounts,
)
from evolving_infra.errors import InputError

TRUE = (4e-3, 1e-4, 2e-9, 3e-6)


def prefill_samples(seed: int, weights=TRUE):
    """Endless (features, seconds), three a window of one second."""
    chosen = random.Random(seed)
    while True:
        uncached = chosen.randrange(1, 2000)
        cached = chosen.randrange(0, 50_000)
        pairs = uncached * cached + uncached * (uncached + 1) // 2
        features = (1.0, uncached, pairs, chosen.randrange(0, cached + 1))
        yield features, sum(w * x for w, x in zip(weights, features, strict=True))


def feed(model: FittedTime, samples, windows: int, start: float, factor: float = 1.0) -> float:
    """Observe whole windows and return the time after them."""
    for i in range(3 * windows):
        features, seconds = next(samples)
        model.observe(features, factor * seconds, start + i / 2.9)
    return start + windows * 3 / 2.9


def test_prefill_coefficients_are_recovered() -> None:
    model = FittedTime(DEFAULT_PREFILL)
    feed(model, prefill_samples(1), WARM_UP_WINDOWS, 0.0)
    assert model.weights().tolist() == pytest.approx(TRUE, rel=1e-3)


def test_held_out_error_under_noise_is_below_five_percent() -> None:
    model, noise = FittedTime(DEFAULT_PREFILL), random.Random(7)
    samples = prefill_samples(2)
    for i in range(120):
        features, seconds = next(samples)
        model.observe(features, seconds * noise.uniform(0.9, 1.1), i / 2.9)
    held_out = [next(samples) for _ in range(100)]
    errors = [abs(model.seconds(x) - seconds) / seconds for x, seconds in held_out]
    assert sum(errors) / len(errors) < 0.05


def test_before_the_first_fit_defaults_are_scaled_by_what_was_measured() -> None:
    model = FittedTime((0.0, 1e-3, 0.0, 0.0))
    assert not model.is_learned
    assert model.seconds((1.0, 100, 0, 0)) == pytest.approx(0.1)
    model.observe((1.0, 50, 0, 0), 0.2, 0.0)
    assert model.is_learned
    assert model.seconds((1.0, 100, 0, 0)) == pytest.approx(0.4)


def test_frozen_after_warm_up_and_unmoved_by_small_errors() -> None:
    model, samples = FittedTime(DEFAULT_PREFILL), prefill_samples(3)
    now = feed(model, samples, MIN_WINDOWS + 1, 0.0)
    assert not model.is_frozen
    now = feed(model, samples, WARM_UP_WINDOWS, now)
    assert model.is_frozen
    frozen = model.weights().tolist()
    feed(model, samples, 3 * DRIFT_WINDOWS, now, factor=1.1)
    assert model.is_frozen
    assert model.weights().tolist() == frozen


def test_drift_refits() -> None:
    model, samples = FittedTime(DEFAULT_PREFILL), prefill_samples(4)
    now = feed(model, samples, WARM_UP_WINDOWS + 2, 0.0)
    now = feed(model, samples, DRIFT_WINDOWS + 1, now, factor=2.0)
    assert not model.is_frozen
    feed(model, samples, WARM_UP_WINDOWS + 1, now, factor=2.0)
    assert model.is_frozen
    assert model.weights().tolist() == pytest.approx([2 * w for w in TRUE], rel=1e-2)


def test_drift_must_last_to_count() -> None:
    model, samples = FittedTime(DEFAULT_PREFILL), prefill_samples(5)
    now = feed(model, samples, WARM_UP_WINDOWS + 2, 0.0)
    for _ in range(4):
        now = feed(model, samples, DRIFT_WINDOWS - 2, now + 1, factor=2.0)
        now = feed(model, samples, 2, now + 1)
    assert model.is_frozen


@pytest.mark.parametrize("share", [0.0, 0.25], ids=["dense", "moe"])
def test_decode_time_over_batch_sizes(share) -> None:
    times = IterationTimes(share)
    d0, d1, d2 = 3e-3, 8e-3, 5e-4

    def truth(running: int) -> float:
        return d0 + d1 * (1 - (1 - share) ** running) + d2 * running

    for i in range(200):
        running = 1 + i * 7 % 16
        times.observe_decode("a", truth(running), running, i / 3.0)
    for running in range(1, 17):
        assert times.decode_seconds("a", running) == pytest.approx(truth(running), rel=0.01)
    assert times.decode_seconds("a", 0) == 0.0


def test_a_node_without_measurements_borrows_the_first_that_has_some() -> None:
    times = IterationTimes(0.0)
    default = times.prefill_seconds("a", 100, 0, 0)
    assert not times.is_learned("a")
    times.observe_prefill("c", 9.0, (100, 5050, 0), 0.0)
    times.observe_prefill("b", 1.0, (100, 5050, 0), 0.0)
    assert times.is_learned("a")
    assert times.prefill_seconds("a", 100, 0, 0) == pytest.approx(1.0)
    assert times.prefill_seconds("c", 100, 0, 0) == pytest.approx(9.0)
    assert default != pytest.approx(1.0)


def test_a_drift_that_the_model_saw_no_time_in_is_fitted_from_scratch() -> None:
    """Warmed up on restores alone it gives computing no time: there is nothing to scale."""
    model = FittedTime(DEFAULT_PREFILL)
    for i in range(WARM_UP_WINDOWS + 2):
        model.observe((1.0, 1, 1, 500 + i), 1e-3 * (500 + i), 1.01 * i)
    assert model.is_frozen
    computing = (1.0, 200, 20_000, 0)
    assert model.seconds(computing) == pytest.approx(0.0, abs=1e-9)
    for i in range(DRIFT_WINDOWS + 1):
        model.observe(computing, 0.05, 100 + 1.01 * i)
    assert model.seconds(computing) == pytest.approx(0.05)


SECONDS = st.sampled_from([0.0, 5e-324, 1e-12, 1e-6, 1e-3, 0.05, 1.0, 100.0])
WORK = st.tuples(st.just(1.0), *[st.sampled_from([0, 1, 300, 10**6, 10**12])] * 3)


@given(st.lists(st.tuples(WORK, SECONDS, st.integers(1, 12)), min_size=5, max_size=30), WORK)
def test_predictions_are_finite_whatever_was_measured(measured, asked) -> None:
    model, now = FittedTime(DEFAULT_PREFILL), 0.0
    for features, seconds, windows in measured:
        for _ in range(windows):
            model.observe(features, seconds, now)
            now += 1.01
    assert 0 <= model.seconds(asked) < float("inf")


def test_a_fetch_that_brought_nothing_teaches_nothing() -> None:
    times = IterationTimes(0.0)
    times.observe_fetch(0.01, 20, 0.0)
    before = times.fetch_seconds(20)
    times.observe_fetch(5.0, 0, 0.1)
    assert times.fetch_seconds(20) == before == pytest.approx(0.01)


@pytest.mark.parametrize("amount", [-1, float("nan"), float("inf")])
def test_amounts_must_be_finite_and_not_negative(amount) -> None:
    with pytest.raises(InputError, match="seconds: expected a finite number, 0 or more"):
        check_amounts(seconds=amount)
