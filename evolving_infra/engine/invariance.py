"""Start-up check that this machine's arithmetic keeps the rule the engine's exactness rests on."""

import torch

from evolving_infra.engine.model import Model, Pools, Segment, device_pools
from evolving_infra.errors import BackendError

TOKENS = 70
"""More than a key block and no multiple of anything the arithmetic is cut into."""


def check_invariance(model: Model) -> None:
    """Compute one prompt whole, and in pieces beside another one: logits and KV must be equal bits.

    Raises ``BackendError`` if they are not. Takes milliseconds.
    """
    per_prompt = -(-TOKENS // model.page_size)
    pages = tuple(range(2 * per_prompt))
    mine, other = pages[:per_prompt], pages[per_prompt:]
    prompt = tuple((7 * i * i + 3 * i) % 251 for i in range(TOKENS))
    whole, pieces = (device_pools(model.layout, len(pages), model.device) for _ in range(2))
    expected = model.forward((_segment(prompt, 0, TOKENS, mine),), whole)[0]
    mate = _segment(prompt[::-1], 0, 37, other)
    model.forward((mate, _segment(prompt, 0, 33, mine)), pieces)
    model.forward((_segment(prompt, 33, 69, mine),), pieces)
    got = model.forward((mate, _segment(prompt, 69, TOKENS, mine)), pieces)[1]
    if not torch.equal(expected, got) or not _equal(whole, pieces, per_prompt):
        raise BackendError(
            f"matrix products on {model.device} depend on the batch: tokens would not be exact"
        )


def _segment(prompt: tuple[int, ...], first: int, end: int, pages: tuple[int, ...]) -> Segment:
    return Segment(tokens=prompt[first:end], first_position=first, pages=pages)


def _equal(left: Pools, right: Pools, pages: int) -> bool:
    return all(
        torch.equal(a[:pages], b[:pages])
        for rank_a, rank_b in zip(left, right, strict=True)
        for a, b in zip(rank_a, rank_b, strict=True)
    )
