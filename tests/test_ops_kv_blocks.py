"""kv_offload and kv_restore: byte for byte against the reference, in every layout."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evolving_infra.errors import BackendMissing, InputError
from evolving_infra.ops.host_blocks import HostBlocks
from evolving_infra.ops.kv_offload import kv_offload
from evolving_infra.ops.kv_restore import kv_restore
from evolving_infra.types import KvLayout
from tests.test_ops_samples import (
    GQA,
    LAYOUTS,
    MLA,
    new_blocks,
    page_is_same,
    random_pools,
    same_bytes,
)

BACKENDS = ["core", "torch"]
PAGES = [5, 0, 3]


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> KvLayout:
    return LAYOUTS[request.param]


def counts_of(layout: KvLayout) -> list[int]:
    return [layout.page_size, 1, layout.page_size - 1]


def offloaded(layout: KvLayout, backend: str = "auto") -> tuple[list, HostBlocks]:
    pools = random_pools(layout, 6, seed=1)
    blocks = new_blocks(layout, 3, order=[2, 0, 1])
    kv_offload(pools, PAGES, counts_of(layout), layout, blocks, backend=backend)
    return pools, blocks


def test_records_are_those_of_the_reference(layout: KvLayout) -> None:
    _, core = offloaded(layout, "core")
    _, reference = offloaded(layout, "torch")
    assert np.array_equal(core.memory, reference.memory)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("verify", ["pool", "device"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_restored_pages_have_the_same_bytes(
    layout: KvLayout, backend: str, verify: str, threads: int
) -> None:
    pools, blocks = offloaded(layout)
    target = random_pools(layout, 8, seed=2)
    before = [[layer.clone() for layer in rank] for rank in target]
    got = kv_restore(
        blocks, target, [7, 1, 4], layout, backend=backend, verify=verify, threads=threads
    )
    assert got == counts_of(layout)
    for page, restored in zip(PAGES, [7, 1, 4], strict=True):
        assert page_is_same(pools, page, target, restored)
    for untouched in (0, 2, 3, 5, 6):
        assert page_is_same(before, untouched, target, untouched)


def test_replicated_blocks_come_from_rank_0_and_reach_all_ranks() -> None:
    pools = random_pools(MLA, 2, seed=3)
    pools[1] = random_pools(MLA, 2, seed=4)[1]
    blocks = new_blocks(MLA, 1)
    kv_offload(pools, [1], [16], MLA, blocks)
    target = random_pools(MLA, 2, seed=5)
    assert kv_restore(blocks, target, [0], MLA) == [16]
    for rank in target:
        assert all(same_bytes(a[0], b[1]) for a, b in zip(rank, pools[0], strict=True))


def test_no_blocks_is_legal(layout: KvLayout) -> None:
    pools = random_pools(layout, 2, seed=0)
    blocks = new_blocks(layout, 0)
    kv_offload(pools, [], [], layout, blocks)
    assert kv_restore(blocks, pools, [], layout) == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_zero_restore_goes_unnoticed_only_without_a_device_check(
    layout: KvLayout, backend: str
) -> None:
    _, blocks = offloaded(layout)
    target = random_pools(layout, 6, seed=2)
    restore = partial(
        kv_restore, blocks, target, PAGES, layout, backend=backend, fault="zero_restore"
    )
    assert restore() == counts_of(layout)
    for rank in target:
        for layer in rank:
            assert not layer[PAGES].view(torch.uint8).any()
    assert restore(verify="device") == [0, 0, 0]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.randoms(use_true_random=False), st.sampled_from(sorted(LAYOUTS)))
def test_any_order_of_pages_and_slots_comes_back(count: int, random: object, name: str) -> None:
    layout = LAYOUTS[name]
    order = list(range(count))
    random.shuffle(order)  # type: ignore[attr-defined]
    pages = list(range(8))
    random.shuffle(pages)  # type: ignore[attr-defined]
    pools = random_pools(layout, 8, seed=count)
    blocks = new_blocks(layout, count, order=order)
    kv_offload(pools, pages[:count], [layout.page_size] * count, layout, blocks)
    target = random_pools(layout, 8, seed=99)
    assert kv_restore(blocks, target, order, layout) == [layout.page_size] * count
    for page, restored in zip(pages, order, strict=False):
        assert page_is_same(pools, page, target, restored)


def test_named_core_needs_host_memory() -> None:
    pools = [[layer.to("meta") for layer in rank] for rank in random_pools(MLA, 2, seed=0)]
    with pytest.raises(BackendMissing, match="moves host memory only, a pool is on meta"):
        kv_restore(new_blocks(MLA, 1), pools, [0], MLA, backend="core")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda a: a.update(pages=[6]), "pages: expected pages in \\[0, 6\\), got 6"),
        (lambda a: a.update(pages=[-1]), "pages: expected pages in \\[0, 6\\), got -1"),
        (lambda a: a.update(pages=[0, 1]), "pages: expected 1, one per block, got 2"),
        (lambda a: a.update(verify="never"), "verify: expected pool or device, got 'never'"),
        (lambda a: a.update(fault="typo"), "fault: expected zero_restore or None, got 'typo'"),
        (lambda a: a.update(backend="gpu"), "backend: expected one of auto, core, torch"),
        (lambda a: a.update(pools=a["pools"][:1]), "pools: expected 2 ranks, got 1"),
        (lambda a: a["pools"][1].pop(), "pools\\[1\\]: expected 3 layers, got 2"),
        (
            lambda a: a["pools"][0].__setitem__(0, a["pools"][0][0].float()),
            "pools\\[0\\]\\[0\\]: expected contiguous bfloat16 \\[6, 16, 80\\], got 'float32",
        ),
        (
            lambda a: a["pools"][0].__setitem__(1, a["pools"][0][1].transpose(1, 2)),
            "pools\\[0\\]\\[1\\]: expected contiguous",
        ),
        (lambda a: a.update(blocks=new_blocks(GQA, 1)), "blocks.memory: expected uint8"),
        (lambda a: a["blocks"].slots.__setitem__(0, 1), "blocks.slots: expected slots in \\[0, 1"),
    ],
)
def test_bad_arguments_are_named(change: object, text: str) -> None:
    arguments = {
        "blocks": new_blocks(MLA, 1),
        "pools": random_pools(MLA, 6, seed=0),
        "pages": [0],
        "layout": MLA,
    }
    change(arguments)  # type: ignore[operator]
    with pytest.raises(InputError, match=text):
        kv_restore(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [0, 17, -1])
def test_token_counts_are_checked(tokens: int) -> None:
    with pytest.raises(InputError, match="token_counts: expected 1 to 16 tokens"):
        kv_offload(random_pools(MLA, 2, seed=0), [0], [tokens], MLA, new_blocks(MLA, 1))


def test_read_only_mapping_is_no_target() -> None:
    blocks = new_blocks(MLA, 1)
    blocks.memory.flags.writeable = False
    with pytest.raises(InputError, match="expected a writable mapping"):
        kv_offload(random_pools(MLA, 2, seed=0), [0], [16], MLA, blocks)
