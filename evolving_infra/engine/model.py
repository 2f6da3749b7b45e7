"""A small decoder-only transformer over paged KV, exact in the sense of design section 8.

    x += output(attention(norm(x)));  x += mlp(norm(x));  logits = norm(x) head

Every token's KV is rounded to the pool's dtype when written, and attention reads what was written,
also within one chunk: computed, reused and restored KV are the same bits.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from evolving_infra.config import EngineConfig
from evolving_infra.engine.attention import PagedAttention, head_shape
from evolving_infra.engine.moe import moe, swiglu
from evolving_infra.engine.tiles import pad_rows, rms_norm, tiled_matmul
from evolving_infra.engine.weights import ExpertWeights, LayerWeights, random_weights
from evolving_infra.errors import BackendMissing
from evolving_infra.types import Attention, KvLayout

ROPE_THETA = 10_000.0
Pools = list[list[Tensor]]
"""``pools[rank][layer]``: ``[num_pages, page_size, row]`` of the KV dtype."""


def _device(name: str) -> torch.device:
    """The named device. ``BackendMissing`` if torch can't use it here."""
    if name == "cuda" and not torch.cuda.is_available():
        raise BackendMissing("device: torch finds no CUDA device and driver here; use --device cpu")
    return torch.device(name)


def device_pools(layout: KvLayout, num_pages: int, device: torch.device) -> Pools:
    """Zeroed device memory of every rank and layer."""
    size = (num_pages, layout.page_size, layout.row)
    dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[layout.dtype]
    return [
        [torch.zeros(size, dtype=dtype, device=device) for _ in range(layout.num_layers)]
        for _ in range(layout.tp_size)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Consecutive tokens of one sequence in one iteration.

    ``pages`` are the sequence's pages in order, at least up to its last token of this iteration.
    """

    tokens: tuple[int, ...]
    first_position: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """Segments side by side. Tensors are ``[tokens]`` int64; spans are rows of each segment."""

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    spans: tuple[tuple[int, int], ...]
    pages: tuple[Tensor, ...]
    starts: tuple[int, ...]


class Model:
    """Weights, rotary tables and scratch memory; the pools belong to the engine."""

    def __init__(self, config: EngineConfig) -> None:
        shape = config.model_config
        self.device = _device(config.device)
        self.shape = shape
        self.layout = config.layout
        self.page_size = config.page_size
        self.weights = random_weights(shape, self.device)
        heads = head_shape(shape, config.tp_size)
        self._ranks = tuple(
            PagedAttention(heads, config.max_context_tokens, self.device)
            for _ in range(config.tp_size)
        )
        self._all = head_shape(shape, 1)
        self._rope = shape.rope if shape.attention is Attention.MLA else shape.head_dim
        cos, sin = _rotary_tables(self._rope, config.max_context_tokens)
        self._cos, self._sin = cos.to(self.device), sin.to(self.device)

    @torch.inference_mode()
    def forward(self, segments: tuple[Segment, ...], pools: Pools) -> Tensor:
        """Compute the segments, write their KV, return the logits after each one's last token.

        Returns ``[len(segments), vocab]`` float32 on the model's device.
        """
        batch = self._batch(segments)
        tokens = batch.tokens.shape[0]
        x = pad_rows(self.weights.embedding.index_select(0, batch.tokens))
        for index, layer in enumerate(self.weights.layers):
            normed = rms_norm(x, layer.attention_norm)
            x = x + self._attention(normed, batch, layer, [rank[index] for rank in pools])
            normed = rms_norm(x, layer.mlp_norm)
            if isinstance(layer.mlp, ExpertWeights):
                x = x + moe(normed, tokens, layer.mlp)
            else:
                x = x + swiglu(normed, layer.mlp)
        last = torch.tensor([end - 1 for _, end in batch.spans], device=self.device)
        final = rms_norm(pad_rows(x.index_select(0, last)), self.weights.final_norm)
        return tiled_matmul(final, self.weights.head)[: len(segments)]

    def _batch(self, segments: tuple[Segment, ...]) -> _Batch:
        tokens: list[int] = []
        spans, positions, slots, pages = [], [], [], []
        for segment in segments:
            spans.append((len(tokens), len(tokens) + len(segment.tokens)))
            tokens += segment.tokens
            place = np.arange(len(segment.tokens)) + segment.first_position
            table = np.asarray(segment.pages, np.int64)[: place[-1] // self.page_size + 1]
            positions.append(place)
            slots.append(table[place // self.page_size] * self.page_size + place % self.page_size)
            pages.append(torch.from_numpy(table).to(self.device))
        return _Batch(
            tokens=torch.tensor(tokens, device=self.device),
            positions=torch.from_numpy(np.concatenate(positions)).to(self.device),
            slots=torch.from_numpy(np.concatenate(slots)).to(self.device),
            spans=tuple(spans),
            pages=tuple(pages),
            starts=tuple(segment.first_position for segment in segments),
        )

    def _attention(
        self, x: Tensor, batch: _Batch, layer: LayerWeights, pools: list[Tensor]
    ) -> Tensor:
        """``[rows, hidden]`` of normed input to the same of attention output; writes KV."""
        every, tokens = self._all, batch.tokens.shape[0]
        queries = tiled_matmul(x, layer.query).view(-1, every.heads, every.key_dim)[:tokens]
        queries = self._rotate(queries, batch.positions) * every.key_dim**-0.5
        rows = tiled_matmul(x, layer.key_value).view(-1, every.streams, every.width)
        rows = self._key_value(rows, tokens, batch.positions)
        outputs = []
        heads, streams = every.heads // len(pools), -(-every.streams // len(pools))
        for rank, (attention, pool) in enumerate(zip(self._ranks, pools, strict=True)):
            own = rows if every.streams == 1 else rows[:, rank * streams : (rank + 1) * streams]
            pool.view(-1, pool.shape[2])[batch.slots] = own.reshape(tokens, -1).to(pool.dtype)
            mine = queries[:, rank * heads : (rank + 1) * heads]
            outputs.append(_attend(attention, mine, batch, pool))
        return tiled_matmul(pad_rows(torch.cat(outputs, dim=1).view(tokens, -1)), layer.output)

    def _key_value(self, rows: Tensor, tokens: int, positions: Tensor) -> Tensor:
        """Pool rows ``[tokens, streams, width]``: keys rotated, an MLA latent also normed."""
        if self.shape.attention is Attention.MLA:
            latent = rows[..., self._rope :]
            ones = torch.ones(1, device=self.device)
            rows = torch.cat((rows[..., : self._rope], rms_norm(latent, ones)), dim=-1)
        return self._rotate(rows[:tokens], positions)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotary embedding of the first elements of ``x`` ``[tokens, heads, dim]``."""
        half = self._rope // 2
        cos = self._cos.index_select(0, positions)[:, None]
        sin = self._sin.index_select(0, positions)[:, None]
        left, right, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat((left * cos - right * sin, right * cos + left * sin, rest), dim=-1)


def _attend(attention: PagedAttention, queries: Tensor, batch: _Batch, pool: Tensor) -> Tensor:
    """One rank's attention of every segment: ``[tokens, heads of the rank, value_dim]``."""
    outputs = []
    for (first, end), pages, start in zip(batch.spans, batch.pages, batch.starts, strict=True):
        attention.load(pool, pages, start + end - first)
        outputs.append(attention.attend(queries[first:end].contiguous(), start))
    return torch.cat(outputs)


def _rotary_tables(dim: int, positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[positions, dim / 2]`` float32, from float64 angles."""
    frequencies = ROPE_THETA ** -(np.arange(0, dim, 2) / dim)
    angles = np.arange(positions)[:, None] * frequencies[None]
    cos, sin = np.cos(angles), np.sin(angles)
    return torch.from_numpy(cos.astype(np.float32)), torch.from_numpy(sin.astype(np.float32))
