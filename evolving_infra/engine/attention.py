"""Exact paged attention: a query tile's result depends on its absolute position only.

Queries are cut into tiles of 16 rows (``queries_per_tile`` positions times the heads that share one
key stream), aligned at absolute positions; keys into blocks of 64, aligned likewise. A tile reads
the key blocks up to its own last position, so every shape in its arithmetic is a function of that
position: not of the chunk, the batch, the page size or of what else is in the pool.

    scores[b] = q K_b^T            one product of fixed shape per key block b
    p = exp(scores - max)          0 exactly where masked
    out = sum_b p[b] [V_b | 1]     the column of ones yields the softmax denominator
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from evolving_infra.config import ModelConfig
from evolving_infra.engine.tiles import TILE_ROWS
from evolving_infra.types import Attention

KEY_BLOCK = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """How one rank's pool row is read. A row is ``streams`` times ``width`` elements.

    A stream is what a group of query heads shares: ``[key | value]``. For MLA there is one stream
    ``[rope | latent]``, its key is all of it and its value the latent, so the two overlap.
    """

    streams: int
    group: int
    """Query heads per stream."""
    key_dim: int
    value_start: int
    value_dim: int

    @property
    def width(self) -> int:
        return self.value_start + self.value_dim

    @property
    def heads(self) -> int:
        return self.streams * self.group

    @property
    def queries_per_tile(self) -> int:
        return TILE_ROWS // self.group


def head_shape(shape: ModelConfig, tp_size: int) -> HeadShape:
    """Heads of one of ``tp_size`` ranks."""
    if shape.attention is Attention.MLA:
        return HeadShape(
            streams=1,
            group=shape.heads // tp_size,
            key_dim=shape.rope + shape.latent,
            value_start=shape.rope,
            value_dim=shape.latent,
        )
    return HeadShape(
        streams=shape.kv_heads // tp_size,
        group=shape.heads // shape.kv_heads,
        key_dim=shape.head_dim,
        value_start=shape.head_dim,
        value_dim=shape.head_dim,
    )


class PagedAttention:
    """Attention of one rank's heads over one rank's pools, with its scratch memory.

    ``max_tokens`` is the longest context; the scratch holds one sequence's keys of one layer.
    """

    def __init__(self, heads: HeadShape, max_tokens: int, device: torch.device) -> None:
        self.heads = heads
        blocks = -(-max_tokens // KEY_BLOCK)
        # [stream, block, token, key | value | 1 | 0 ...]: rows end on 64-byte boundaries.
        columns = -(-(heads.width + 1) // 16) * 16
        self._scratch = torch.zeros(heads.streams, blocks, KEY_BLOCK, columns, device=device)
        self._scratch[..., heads.width] = 1.0
        self._masks = _causal_masks(heads, device)

    def load(self, pool: Tensor, pages: Tensor, tokens: int) -> int:
        """Read a sequence's rows from its pages. Returns the number of key blocks.

        Args:
            pool: ``[num_pages, page_size, streams * width]``, the stored KV of one layer.
            pages: ``[used_pages]`` int64, the sequence's pages in order.
            tokens: Rows that are valid; the rest of the last key block becomes zero.
        """
        heads = self.heads
        blocks = -(-tokens // KEY_BLOCK)
        rows = pool.index_select(0, pages).view(-1, heads.streams, heads.width)[:tokens]
        flat = self._scratch[:, :blocks].view(heads.streams, -1, self._scratch.shape[-1])
        flat[:, :tokens, : heads.width] = rows.transpose(0, 1)
        flat[:, tokens:, : heads.width] = 0.0
        return blocks

    def attend(self, queries: Tensor, first_position: int) -> Tensor:
        """Causal attention of consecutive queries of the sequence that was loaded last.

        Args:
            queries: ``[count, heads, key_dim]`` float32, already scaled.
            first_position: Absolute position of the first one.

        Returns ``[count, heads, value_dim]`` float32.
        """
        heads, size = self.heads, self.heads.queries_per_tile
        count = queries.shape[0]
        skipped = first_position % size
        num_tiles = -(-(skipped + count) // size)
        tiles = queries.new_zeros(num_tiles * size, heads.streams, heads.group, heads.key_dim)
        tiles[skipped : skipped + count] = queries.view(count, heads.streams, heads.group, -1)
        tiles = tiles.view(num_tiles, size, heads.streams, heads.group, -1).transpose(1, 2)
        tiles = tiles.reshape(num_tiles, heads.streams, TILE_ROWS, heads.key_dim)
        out = queries.new_empty(num_tiles, heads.streams, TILE_ROWS, heads.value_dim)
        for index in range(num_tiles):
            tile_position = (first_position // size + index) * size
            for stream in range(heads.streams):
                out[index, stream] = self._tile(tiles[index, stream], stream, tile_position)
        out = out.view(num_tiles, heads.streams, size, heads.group, -1).transpose(1, 2)
        out = out.reshape(num_tiles * size, heads.heads, heads.value_dim)
        return out[skipped : skipped + count]

    def _tile(self, queries: Tensor, stream: int, position: int) -> Tensor:
        """``[TILE_ROWS, key_dim]`` queries at ``position`` -> ``[TILE_ROWS, value_dim]``."""
        heads = self.heads
        blocks = position // KEY_BLOCK + 1
        rows = self._scratch[stream, :blocks]
        keys = rows[..., : heads.key_dim].transpose(1, 2)
        scores = torch.bmm(queries.expand(blocks, -1, -1), keys)
        # A tile never straddles key blocks, so only its last block holds later positions.
        scores[-1] += self._masks[position % KEY_BLOCK // heads.queries_per_tile]
        scores -= scores.amax(2).amax(0).view(1, TILE_ROWS, 1)
        out = torch.bmm(scores.exp_(), rows[..., heads.value_start : heads.width + 1]).sum(0)
        return out[:, :-1] / out[:, -1:]


def _causal_masks(heads: HeadShape, device: torch.device) -> Tensor:
    """``[KEY_BLOCK / queries_per_tile, TILE_ROWS, KEY_BLOCK]``: 0 where seen, else -inf."""
    later = torch.ones(KEY_BLOCK, KEY_BLOCK, device=device).triu(1).bool()
    mask = torch.zeros(KEY_BLOCK, KEY_BLOCK, device=device).masked_fill(later, float("-inf"))
    mask = mask.repeat_interleave(heads.group, dim=0)
    return mask.view(-1, TILE_ROWS, KEY_BLOCK)
