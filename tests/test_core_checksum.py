"""The block checksum: native paths against its meaning in numpy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evolving_infra import _core
from evolving_infra.ops.reference.checksum import STRIPE_WORDS, checksum

LENGTHS = [0, 1, 7, 8, 9, 1023, 1024, 1025, 5003]


def words(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, 4 * count, dtype=np.uint8)


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("first_word", [0, 3, 8, STRIPE_WORDS - 1, 7 * STRIPE_WORDS + 16])
@pytest.mark.parametrize("count", LENGTHS)
def test_native_sum_is_the_reference(count: int, first_word: int, portable: bool) -> None:
    data = words(count)
    assert _core.checksum(data, first_word, portable) == checksum(data, first_word)


def test_largest_words_wrap_alike() -> None:
    data = np.full(4 * 3000, 0xFF, dtype=np.uint8)
    assert _core.checksum(data) == _core.checksum(data, portable=True) == checksum(data)


@given(st.integers(1, 4000), st.data())
def test_the_sum_of_parts_is_the_sum(count: int, data: st.DataObject) -> None:
    whole = words(count, seed=count)
    cut = data.draw(st.integers(0, count))
    parts = _core.checksum(whole[: 4 * cut]) + _core.checksum(whole[4 * cut :], cut)
    assert parts % 2**64 == _core.checksum(whole)


@given(st.integers(0, 5002), st.integers(0, 31))
def test_every_flipped_bit_shows(word: int, bit: int) -> None:
    data = words(5003)
    before = _core.checksum(data)
    data[4 * word + bit // 8] ^= 1 << bit % 8
    assert _core.checksum(data) != before


@given(st.integers(0, 3000), st.integers(0, 3000))
def test_swapped_words_show(one: int, other: int) -> None:
    data = words(3001)
    before = _core.checksum(data)
    view = data.view(np.uint32)
    if view[one] == view[other]:
        return
    view[[one, other]] = view[[other, one]]
    assert _core.checksum(data) != before


def test_partial_words_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 4 bytes"):
        _core.checksum(np.zeros(5, dtype=np.uint8))
