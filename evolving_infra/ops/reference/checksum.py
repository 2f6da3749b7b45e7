"""Meaning of the block checksum, in numpy.

    S = sum over 32-bit words of x[i] * w(i)  mod 2**64
    w(i) = lane(i % 1024) * stripe(i // 1024),  lane(k) = mix(k) | 1,  stripe(j) = mix(~j) | 1

``mix`` is SplitMix64's output function. Odd weights make any change of one word visible.
"""

import numpy as np
from numpy.typing import NDArray

STRIPE_WORDS = 1024


def checksum(words: NDArray[np.uint8], first_word: int = 0) -> int:
    """Part of the checksum of ``words`` (``[4 * n]`` uint8), whose first is word ``first_word``."""
    values = words.view("<u4").astype(np.uint64)
    index = np.arange(first_word, first_word + len(values), dtype=np.uint64)
    lanes = _mix(index % np.uint64(STRIPE_WORDS)) | np.uint64(1)
    stripes = _mix(~(index // np.uint64(STRIPE_WORDS))) | np.uint64(1)
    return int((values * lanes * stripes).sum(dtype=np.uint64))


def _mix(index: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (index + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return mixed
