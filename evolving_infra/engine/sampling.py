"""Picking one token. It depends on the logits, the seed and the position, on nothing else."""

import numpy as np
from numpy.typing import NDArray

from evolving_infra.types import VOCAB_USED, SamplingParams

_MASK = (1 << 64) - 1


def pick(logits: NDArray[np.float32], sampling: SamplingParams, position: int) -> int:
    """Token for absolute ``position`` from logits ``[vocab]``; ids from ``VOCAB_USED`` never.

    Greedy at temperature 0, ties to the lowest id; else softmax at the temperature, cut to the
    smallest set of likeliest tokens whose probability reaches ``top_p``.
    """
    used = logits[:VOCAB_USED].astype(np.float64)
    if sampling.temperature == 0:
        return int(used.argmax())
    scaled = np.exp((used - used.max()) / sampling.temperature)
    order = np.argsort(-scaled, kind="stable")
    cumulative = np.cumsum(scaled[order])
    kept = int(np.searchsorted(cumulative, sampling.top_p * cumulative[-1])) + 1
    kept = min(kept, len(order))
    target = uniform(sampling.seed, position) * cumulative[kept - 1]
    return int(order[min(int(np.searchsorted(cumulative, target, side="right")), kept - 1)])


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from a counter: no state, so it survives preemption and hand-off.

    Two rounds of the splitmix64 finaliser (Steele, Lea, Flood 2014) over seed and position.
    """
    return (_mix(_mix(seed & _MASK) + position) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
