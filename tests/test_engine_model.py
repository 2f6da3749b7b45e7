"""The arithmetic against plain references, and logits that are worth comparing."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from evolving_infra.config import EngineConfig
from evolving_infra.engine import model as model_module
from evolving_infra.engine.attention import PagedAttention, head_shape
from evolving_infra.engine.invariance import check_invariance
from evolving_infra.engine.model import Model, Segment, device_pools
from evolving_infra.engine.moe import moe, swiglu
from evolving_infra.engine.tiles import TILE_ROWS, pad_rows, tiled_matmul
from evolving_infra.engine.weights import ExpertWeights, MlpWeights
from evolving_infra.errors import BackendError, BackendMissing, InputError
from evolving_infra.types import VOCAB_USED
from tests.test_engine_rig import GQA, SMALL, Rig, alone, prompt_of

MLA_EXACT, GQA_EXACT = (replace(config, kv_dtype="float32") for config in (SMALL, GQA))
both = pytest.mark.parametrize("config", [SMALL, GQA], ids=["mla", "gqa"])


@both
@pytest.mark.parametrize(("first", "count"), [(0, 1), (0, 70), (63, 2), (129, 40)])
def test_attention_is_softmax_over_the_pages(config: EngineConfig, first: int, count: int) -> None:
    heads = head_shape(config.model_config, config.tp_size)
    generator = torch.Generator().manual_seed(first + count)
    pool = torch.randn(30, 16, heads.streams * heads.width, generator=generator)
    queries = torch.randn(count, heads.heads, heads.key_dim, generator=generator)
    tokens = first + count
    pages = torch.randperm(30, generator=generator)[: -(-tokens // 16)]
    attention = PagedAttention(heads, 512, torch.device("cpu"))
    attention.load(pool, pages, tokens)
    got = attention.attend(queries, first)

    rows = pool[pages].view(-1, heads.streams, heads.width)[:tokens].double()
    rows = rows.repeat_interleave(heads.group, dim=1)
    scores = torch.einsum("qhd,khd->qhk", queries.double(), rows[..., : heads.key_dim])
    later = torch.arange(tokens)[None] > torch.arange(first, tokens)[:, None]
    weights = scores.masked_fill(later[:, None], float("-inf")).softmax(-1)
    expected = torch.einsum("qhk,khd->qhd", weights, rows[..., heads.value_start :])
    torch.testing.assert_close(got, expected.float(), rtol=1e-4, atol=1e-5)


def test_what_another_sequence_left_behind_does_not_leak() -> None:
    heads = head_shape(SMALL.model_config, 2)
    attention = PagedAttention(heads, 128, torch.device("cpu"))
    pool = torch.ones(4, 16, heads.width)
    pool[1:] = float("inf")
    attention.load(pool, torch.arange(4), 64)
    attention.load(pool, torch.tensor([0]), 10)
    queries = torch.ones(10, heads.heads, heads.key_dim)
    assert torch.equal(attention.attend(queries, 0), torch.ones(10, heads.heads, heads.value_dim))


def plain_logits(config: EngineConfig, tokens: tuple[int, ...]) -> Tensor:
    """The model in float64 from its definition, without pages, tiles or ranks."""
    model = Model(config)
    shape, weights, heads = config.model_config, model.weights, head_shape(config.model_config, 1)
    mla = config is not GQA_EXACT
    half = (shape.rope if mla else shape.head_dim) // 2
    angle = torch.arange(len(tokens)).double()[:, None, None] * 10_000.0 ** (
        -torch.arange(half).double() / half
    )

    def rotate(x: Tensor) -> Tensor:
        pair = torch.complex(x[..., :half], x[..., half : 2 * half])
        pair = pair * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((pair.real, pair.imag, x[..., 2 * half :]), -1)

    def norm(x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    x = weights.embedding.double()[list(tokens)]
    count = len(tokens)
    for layer in weights.layers:
        normed = norm(x)
        query = rotate((normed @ layer.query.double()).view(count, heads.heads, heads.key_dim))
        rows = (normed @ layer.key_value.double()).view(count, heads.streams, heads.width)
        if mla:
            rows = torch.cat((rows[..., : shape.rope], norm(rows[..., shape.rope :])), -1)
        rows = rotate(rows).repeat_interleave(heads.group, 1)
        scores = torch.einsum("qhd,khd->hqk", query, rows[..., : heads.key_dim])
        scores = scores / heads.key_dim**0.5 + torch.full((count, count), -torch.inf).triu(1)
        seen = torch.einsum("hqk,khd->qhd", scores.softmax(-1), rows[..., heads.value_start :])
        x = x + seen.reshape(count, -1) @ layer.output.double()
        padded = pad_rows(norm(x).float())
        mlp = layer.mlp
        added = moe(padded, count, mlp) if isinstance(mlp, ExpertWeights) else swiglu(padded, mlp)
        x = x + added[:count].double()
    return (norm(x[-1:]) @ weights.head.double())[0].float()


@pytest.mark.parametrize("config", [MLA_EXACT, GQA_EXACT], ids=["mla", "gqa"])
def test_logits_are_those_of_the_definition(config: EngineConfig) -> None:
    tokens = prompt_of(4, 50)
    model = Model(config)
    pools = device_pools(config.layout, 4, model.device)
    got = model.forward((Segment(tokens=tokens, first_position=0, pages=(2, 0, 3, 1)),), pools)[0]
    torch.testing.assert_close(got, plain_logits(config, tokens), rtol=1e-3, atol=1e-3)


def test_experts_are_mixed_by_their_normalised_scores() -> None:
    model = Model(SMALL)
    weights = model.weights.layers[0].mlp
    assert isinstance(weights, ExpertWeights)
    x = torch.randn(2 * TILE_ROWS, 128, generator=torch.Generator().manual_seed(1))
    got = moe(x, 20, weights)

    def plain(row: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = (row @ gate_up).chunk(2)
        return (torch.nn.functional.silu(gate) * up) @ down

    for token in range(20):
        top = torch.sigmoid(x[token] @ weights.router).topk(2)
        expected = plain(x[token], weights.shared.gate_up, weights.shared.down)
        for score, expert in zip(top.values / top.values.sum(), top.indices, strict=True):
            expected = expected + score * plain(
                x[token], weights.gate_up[expert], weights.down[expert]
            )
        torch.testing.assert_close(got[token], expected, rtol=1e-4, atol=1e-5)


def test_a_dense_model_has_no_experts_and_swiglu_is_what_it_says() -> None:
    weights = Model(GQA).weights.layers[0].mlp
    assert isinstance(weights, MlpWeights)
    x = torch.randn(TILE_ROWS, 128, generator=torch.Generator().manual_seed(2))
    gate, up = (x @ weights.gate_up).chunk(2, dim=-1)
    expected = (torch.nn.functional.silu(gate) * up) @ weights.down
    torch.testing.assert_close(swiglu(x, weights), expected, rtol=1e-4, atol=1e-5)


@both
def test_every_rank_holds_its_own_kv(config: EngineConfig) -> None:
    """MLA rows are on every rank alike; GQA ranks hold different heads. Neither is left zero."""
    model = Model(config)
    pools = device_pools(config.layout, 4, model.device)
    segment = Segment(tokens=prompt_of(1, 30), first_position=0, pages=(0, 1))
    model.forward((segment,), pools)
    left, right = (rank[-1].view(-1, config.layout.row)[:30] for rank in pools)
    assert (left.abs().sum(-1) > 0).all()
    assert (right.abs().sum(-1) > 0).all()
    assert torch.equal(left, right) == (config is SMALL)


@both
def test_every_rank_reads_its_own_pool(config: EngineConfig) -> None:
    prompt = prompt_of(1, 100)
    for rank in range(2):
        rig = Rig(config)
        rig.submit("r", prompt)
        while not rig.output("r"):
            rig.step()
        for pool in rig.engine.pools[rank]:
            pool.zero_()
        rig.run()
        assert rig.output("r") != alone(config, prompt), rank


@both
def test_logits_are_not_flat_and_outputs_do_not_collapse(config: EngineConfig) -> None:
    margins: list[float] = []
    firsts = set()
    model = Model(config)
    pools = device_pools(config.layout, 32, model.device)
    for seed in range(30):
        segment = Segment(tokens=prompt_of(seed, 60), first_position=0, pages=tuple(range(8)))
        logits = model.forward((segment,), pools)[0, :VOCAB_USED]
        top = logits.topk(2)
        margins.append(float(top.values[0] - top.values[1]))
        firsts.add(int(top.indices[0]))
    assert np.median(margins) > 0.3
    assert len(firsts) > 15
    distinct = [len(set(alone(config, prompt_of(seed, 80), 40))) for seed in range(3)]
    assert min(distinct) > 10


@both
def test_an_early_token_matters_to_a_long_prompt(config: EngineConfig) -> None:
    changed = 0
    for seed in range(5):
        prompt = prompt_of(seed, 400)
        other = (*prompt[:3], prompt[3] ^ 1, *prompt[4:])
        changed += alone(config, prompt, 16) != alone(config, other, 16)
    assert changed >= 4


def test_the_same_seed_gives_the_same_weights_and_another_seed_others() -> None:
    one, two = (Model(SMALL).weights for _ in range(2))
    assert torch.equal(one.head, two.head)
    assert torch.equal(one.layers[3].query, two.layers[3].query)
    shape = replace(SMALL.model_config, seed=21)
    other = model_module.random_weights(shape, torch.device("cpu"))
    assert not torch.equal(one.head, other.head)


def test_a_row_of_a_tiled_product_does_not_depend_on_other_rows() -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(8 * TILE_ROWS, 128, generator=generator)
    weight = torch.randn(128, 400, generator=generator)
    whole = tiled_matmul(x, weight)
    order = torch.randperm(len(x), generator=generator)
    assert torch.equal(tiled_matmul(x[order], weight), whole[order])
    assert torch.equal(tiled_matmul(x[:TILE_ROWS], weight), whole[:TILE_ROWS])


def test_a_machine_that_breaks_the_rule_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def depends_on_batch(x: Tensor, weight: Tensor) -> Tensor:
        return tiled_matmul(x, weight) * (1 + 1e-6 * x.shape[0])

    model = Model(SMALL)
    check_invariance(model)
    monkeypatch.setattr(model_module, "tiled_matmul", depends_on_batch)
    with pytest.raises(BackendError, match="depend on the batch"):
        check_invariance(model)


def test_a_device_that_is_not_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendMissing, match="device: torch finds no CUDA device"):
        Model(replace(SMALL, device="cuda"))
    with pytest.raises(InputError, match="device: expected one of cpu, cuda, got 'tpu'"):
        replace(SMALL, device="tpu")
