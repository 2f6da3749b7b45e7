"""Matrix products whose rows do not depend on how many other rows there are.

A BLAS picks its kernel, and with it the order of additions, by the shape of a product. Here every
product has one shape per weight, 16 rows, and many tiles are a batch of such products. So a row's
bits depend on its own values only, whatever else is computed with it (design section 8).
"""

import torch
from torch import Tensor

TILE_ROWS = 16


def padded(rows: int) -> int:
    """The smallest multiple of ``TILE_ROWS`` that holds ``rows``."""
    return -(-rows // TILE_ROWS) * TILE_ROWS


def pad_rows(x: Tensor) -> Tensor:
    """``x`` ``[rows, width]`` with zero rows added up to a multiple of ``TILE_ROWS``."""
    missing = padded(x.shape[0]) - x.shape[0]
    return torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x


def tiled_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight`` in tiles of 16 rows.

    Args:
        x: ``[rows, inner]`` float32, contiguous, ``rows`` a multiple of ``TILE_ROWS``.
        weight: ``[inner, outer]`` float32.

    Returns ``[rows, outer]`` float32.
    """
    tiles = x.view(-1, TILE_ROWS, x.shape[1])
    batch = tiles.shape[0]
    return torch.bmm(tiles, weight.expand(batch, *weight.shape)).view(x.shape[0], weight.shape[1])


def rms_norm(x: Tensor, weight: Tensor, epsilon: float = 1e-6) -> Tensor:
    """``x / sqrt(mean(x^2) + epsilon) * weight`` over the last dimension; at least 2 rows."""
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + epsilon) * weight
