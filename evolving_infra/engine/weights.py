"""Random weights from a seed: every node draws the same ones.

They are scaled so that the model behaves like a trained one where it matters here: attention picks
few of many keys, and the largest logit is clear and depends on all of the context. So a wrong KV
row shows up as a wrong token. The MLA projections are drawn in absorbed form: the
key and value up-projections are folded into the query and output projections.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from evolving_infra.config import ModelConfig
from evolving_infra.engine.attention import HeadShape, head_shape

Draw = Callable[..., Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpWeights:
    """``gate_up`` ``[hidden, 2 * inner]``, ``down`` ``[inner, hidden]``, float32."""

    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """``router`` ``[hidden, experts]``, ``gate_up`` and ``down`` as in an MLP, one per expert."""

    top_k: int
    router: Tensor
    shared: MlpWeights
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """``query`` ``[hidden, heads * key_dim]``, ``key_value`` ``[hidden, streams * width]``.

    ``output`` is ``[heads * value_dim, hidden]``; norms are ``[hidden]``. All float32.
    """

    attention_norm: Tensor
    query: Tensor
    key_value: Tensor
    output: Tensor
    mlp_norm: Tensor
    mlp: MlpWeights | ExpertWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWeights:
    """``embedding`` ``[vocab, hidden]``, ``head`` ``[hidden, vocab]``, float32."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Tensor


EMBEDDING_GAIN = 0.5
QUERY_GAIN = 2.5
OUTPUT_GAIN = 1.0
MLP_GAIN = 1.0
ROUTER_GAIN = 2.0
HEAD_GAIN = 4.0


def random_weights(shape: ModelConfig, device: torch.device) -> ModelWeights:
    """All weights of a model, drawn on the CPU from ``shape.seed``, then moved to ``device``."""
    source = np.random.Generator(np.random.Philox(shape.seed))

    def draw(*size: int, gain: float = 1.0) -> Tensor:
        """Normal with variance ``gain^2 / inner``: unit inputs give outputs of size ``gain``."""
        values = source.standard_normal(size, np.float32)
        values *= np.float32(gain / size[-2] ** 0.5)
        return torch.from_numpy(values).to(device)

    ones = torch.ones(shape.hidden, device=device)
    embedding = draw(shape.vocab, shape.hidden, gain=EMBEDDING_GAIN * shape.vocab**0.5)
    heads = head_shape(shape, 1)
    layers = tuple(_layer(shape, heads, draw, ones) for _ in range(shape.layers))
    head = draw(shape.hidden, shape.vocab, gain=HEAD_GAIN)
    return ModelWeights(embedding=embedding, layers=layers, final_norm=ones, head=head)


def _layer(shape: ModelConfig, heads: HeadShape, draw: Draw, ones: Tensor) -> LayerWeights:
    hidden = shape.hidden
    return LayerWeights(
        attention_norm=ones,
        query=draw(hidden, heads.heads * heads.key_dim, gain=QUERY_GAIN),
        key_value=draw(hidden, heads.streams * heads.width),
        output=draw(heads.heads * heads.value_dim, hidden, gain=OUTPUT_GAIN),
        mlp_norm=ones,
        mlp=_experts(shape, draw) if shape.experts else _mlp(shape, draw, shape.top_k + 1),
    )


def _mlp(shape: ModelConfig, draw: Draw, width: int) -> MlpWeights:
    """A gated MLP, ``width`` times as wide as one expert."""
    inner = width * shape.expert_hidden
    return MlpWeights(
        gate_up=draw(shape.hidden, 2 * inner), down=draw(inner, shape.hidden, gain=MLP_GAIN)
    )


def _experts(shape: ModelConfig, draw: Draw) -> ExpertWeights:
    return ExpertWeights(
        top_k=shape.top_k,
        router=draw(shape.hidden, shape.experts, gain=ROUTER_GAIN),
        shared=_mlp(shape, draw, 1),
        gate_up=draw(shape.experts, shape.hidden, 2 * shape.expert_hidden),
        down=draw(shape.experts, shape.expert_hidden, shape.hidden, gain=MLP_GAIN),
    )
