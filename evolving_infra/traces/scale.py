"""Shrinking a workload: fewer tokens, shorter waits, the same sharing.

Token position ``p`` becomes ``floor(p * scale)``. Blocks keep their ids and get
``block_size * scale`` tokens, so a shared prefix stays one also where a block is no whole number.
"""

import re
from dataclasses import replace
from fractions import Fraction

from evolving_infra.errors import wrong
from evolving_infra.traces.workload import (
    Dependency,
    TraceRequest,
    Workload,
    whole_microseconds,
)


def parse_scale(text: str) -> Fraction:
    """``1/32``, ``0.5`` or ``2`` as an exact positive number. ``InputError`` on anything else."""
    match = re.fullmatch(r"\d{1,18}(\.\d{1,18})?(/\d{1,18})?", text)
    if not match or (match[1] and match[2]) or (match[2] and int(match[2][1:]) == 0):
        raise wrong("scale", "a positive number such as 1/32", text)
    value = Fraction(text)
    if value <= 0:
        raise wrong("scale", "a positive number such as 1/32", text)
    return value


def scale(
    workload: Workload,
    tokens: Fraction = Fraction(1),
    time: Fraction = Fraction(1),
    max_wait: float | None = None,
) -> Workload:
    """The workload with ``tokens`` times the tokens and ``time`` times the seconds.

    ``max_wait`` caps every delay, in seconds after scaling. A prompt and an answer keep at least
    one token.
    """
    if tokens <= 0 or time <= 0:
        raise wrong("scale", "a positive number", min(tokens, time))
    if max_wait is not None and not max_wait >= 0:
        raise wrong("max_wait", "at least 0 s", max_wait)
    return replace(
        workload,
        block_size=workload.block_size * tokens,
        requests=tuple(_scaled(request, tokens, time, max_wait) for request in workload.requests),
    )


def _scaled(
    request: TraceRequest, tokens: Fraction, time: Fraction, max_wait: float | None
) -> TraceRequest:
    inputs = int(request.input_tokens * tokens)
    both = int((request.input_tokens + request.output_tokens) * tokens)
    recorded = request.recorded_seconds
    return replace(
        request,
        input_tokens=max(1, inputs),
        output_tokens=max(1, both - inputs),
        not_before=_seconds(request.not_before, time),
        dependencies=tuple(_waiting(needed, time, max_wait) for needed in request.dependencies),
        recorded_seconds=None if recorded is None else _seconds(recorded, time),
    )


def _waiting(needed: Dependency, time: Fraction, max_wait: float | None) -> Dependency:
    delay = _seconds(needed.delay, time)
    return replace(needed, delay=delay if max_wait is None else min(delay, max_wait))


def _seconds(seconds: float, time: Fraction) -> float:
    return whole_microseconds(seconds * float(time))
