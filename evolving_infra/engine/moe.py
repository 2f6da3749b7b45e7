"""Mixture of experts: top-k routing, grouped expert products, outputs combined in rank order.

    y = shared(x) + w_1 expert_{e_1}(x) + ... + w_k expert_{e_k}(x)

The experts of a token are added in the order of their router scores, so the sum does not depend on
which other tokens visit an expert. Only experts that some token visits are computed; that is the
phi term of the iteration-time model (design section 7).
"""

import numpy as np
import torch
from torch import Tensor

from evolving_infra.engine.tiles import padded, tiled_matmul
from evolving_infra.engine.weights import ExpertWeights, MlpWeights


def swiglu(x: Tensor, weights: MlpWeights) -> Tensor:
    """``(silu(x G) * x U) D`` of ``[rows, hidden]``; rows a multiple of the tile."""
    return tiled_matmul(_gate(tiled_matmul(x, weights.gate_up)), weights.down)


def moe(x: Tensor, tokens: int, weights: ExpertWeights) -> Tensor:
    """Routed experts plus the shared expert.

    Args:
        x: ``[rows, hidden]`` float32, rows a multiple of the tile, the first ``tokens`` real.
        tokens: Real rows; padding is not routed.
        weights: Router, shared and routed experts.

    Returns ``[rows, hidden]`` float32.
    """
    chosen, mix = _route(x, weights)
    pairs = _experts(x, chosen[:tokens], weights)
    out = swiglu(x, weights.shared)
    for rank in range(weights.top_k):
        out[:tokens] += mix[:tokens, rank : rank + 1] * pairs[:, rank]
    return out


def _route(x: Tensor, weights: ExpertWeights) -> tuple[Tensor, Tensor]:
    """Experts ``[rows, top_k]`` int64 by falling score (ties: lower id), and their weights."""
    scores = torch.sigmoid(tiled_matmul(x, weights.router))
    top, chosen = scores.sort(dim=-1, descending=True, stable=True)
    top = top[:, : weights.top_k]
    return chosen[:, : weights.top_k], top / top.sum(-1, keepdim=True)


def _experts(x: Tensor, chosen: Tensor, weights: ExpertWeights) -> Tensor:
    """``[tokens, top_k, hidden]``: for each token the output of each expert it chose."""
    tokens, top_k = chosen.shape
    flat = chosen.reshape(-1).cpu().numpy()
    order = np.argsort(flat, kind="stable")
    counts = np.bincount(flat, minlength=weights.gate_up.shape[0]).tolist()
    sizes = [padded(count) for count in counts]
    # Each expert's pairs start on a tile; padding repeats row 0 and is dropped.
    places = np.zeros(len(flat), np.int64)
    sources = np.zeros(sum(sizes), np.int64)
    start = done = 0
    for count, size in zip(counts, sizes, strict=True):
        members = order[done : done + count]
        sources[start : start + count] = members // top_k
        places[members] = np.arange(start, start + count)
        start, done = start + size, done + count
    grouped = x.index_select(0, torch.from_numpy(sources).to(x.device))
    hidden = _gate(_grouped_matmul(grouped, sizes, weights.gate_up))
    out = _grouped_matmul(hidden, sizes, weights.down)
    index = torch.from_numpy(places).to(x.device)
    return out.index_select(0, index).view(tokens, top_k, -1)


def _grouped_matmul(x: Tensor, sizes: list[int], weights: Tensor) -> Tensor:
    """Rows of group ``e`` times ``weights[e]``; ``sizes`` are rows per group."""
    parts = [
        tiled_matmul(rows, weights[expert])
        for expert, rows in enumerate(x.split(sizes))
        if len(rows)
    ]
    return torch.cat(parts)


def _gate(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate.contiguous()) * up
