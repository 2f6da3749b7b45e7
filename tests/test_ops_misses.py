"""Everything that is not exactly the expected record is a miss, for every reader."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evolving_infra.ops.block_copy import block_copy
from evolving_infra.ops.host_blocks import HostBlocks
from evolving_infra.ops.kv_offload import kv_offload
from evolving_infra.ops.kv_restore import kv_restore
from evolving_infra.ops.wire_block import WireLayout
from evolving_infra.types import KvLayout
from tests.test_ops_samples import LAYOUTS, MLA, key_of, new_blocks, random_pools

Reader = Callable[[HostBlocks, KvLayout], list[bool]]


def by_restore(backend: str, verify: str) -> Reader:
    def read(blocks: HostBlocks, layout: KvLayout) -> list[bool]:
        pools = random_pools(layout, len(blocks), seed=9)
        pages = list(range(len(blocks)))
        counts = kv_restore(blocks, pools, pages, layout, backend=backend, verify=verify)
        return [count > 0 for count in counts]

    return read


def by_copy(blocks: HostBlocks, layout: KvLayout) -> list[bool]:
    target = new_blocks(layout, len(blocks), generation=1)
    target = dataclasses.replace(target, keys=blocks.keys)
    arrived = block_copy(blocks, target, WireLayout.of(layout))
    after = by_restore("core", "pool")(target, layout)
    assert after == arrived, "what did not arrive is not readable either"
    return arrived


READERS = {
    "core": by_restore("core", "pool"),
    "core-device": by_restore("core", "device"),
    "torch": by_restore("torch", "pool"),
    "copy": by_copy,
}


@pytest.fixture(params=READERS)
def reader(request: pytest.FixtureRequest) -> Reader:
    return READERS[request.param]


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> KvLayout:
    return LAYOUTS[request.param]


def written(layout: KvLayout, count: int = 2, generation: int = 7) -> HostBlocks:
    pools = random_pools(layout, count, seed=1)
    blocks = new_blocks(layout, count, generation=generation)
    kv_offload(pools, list(range(count)), [layout.page_size] * count, layout, blocks)
    return blocks


def test_intact_blocks_are_hits(layout: KvLayout, reader: Reader) -> None:
    assert reader(written(layout), layout) == [True, True]


def test_foreign_key_is_a_miss(layout: KvLayout, reader: Reader) -> None:
    blocks = written(layout)
    swapped = dataclasses.replace(blocks, keys=(key_of(77), blocks.keys[1]))
    assert reader(swapped, layout) == [False, True]


@pytest.mark.parametrize("generation", [6, 8])
def test_other_generation_is_a_miss(layout: KvLayout, reader: Reader, generation: int) -> None:
    blocks = written(layout)
    generations = blocks.generations.copy()
    generations[1, -1] = generation
    stale = dataclasses.replace(blocks, generations=generations)
    assert reader(stale, layout) == [True, False]


def test_zeroed_block_is_a_miss(layout: KvLayout, reader: Reader) -> None:
    blocks = written(layout)
    blocks.memory[blocks.slots[0, 0]] = 0
    assert reader(blocks, layout) == [False, True]


def test_zeroed_payload_is_a_miss(layout: KvLayout, reader: Reader) -> None:
    blocks = written(layout)
    blocks.memory[blocks.slots[0, -1], 128 : WireLayout.of(layout).trailer_offset] = 0
    assert reader(blocks, layout) == [False, True]


def test_torn_block_is_a_miss(layout: KvLayout, reader: Reader) -> None:
    """The second half of the payload is of another write."""
    blocks, other = written(layout), written(layout, generation=8)
    pools = random_pools(layout, 2, seed=3)
    kv_offload(pools, [0, 1], [layout.page_size] * 2, layout, other)
    wire = WireLayout.of(layout)
    middle = (128 + wire.trailer_offset) // 2
    slot = blocks.slots[0, 0]
    blocks.memory[slot, middle : wire.trailer_offset] = other.memory[
        slot, middle : wire.trailer_offset
    ]
    assert reader(blocks, layout) == [False, True]


def test_unpublished_block_is_a_miss(layout: KvLayout, reader: Reader) -> None:
    """What a writer leaves that dies after it opened the slot."""
    blocks = written(layout)
    blocks.memory[blocks.slots[1, 0], :8] = 0
    assert reader(blocks, layout) == [True, False]


def test_other_layout_is_a_miss(reader: Reader) -> None:
    """Same sizes, other meaning of the rows."""
    blocks = written(dataclasses.replace(MLA, dtype="float16"))
    assert reader(blocks, MLA) == [False, False]


def test_swapped_shards_are_a_miss(reader: Reader) -> None:
    layout = LAYOUTS["gqa"]
    blocks = written(layout)
    swapped = dataclasses.replace(blocks, slots=np.ascontiguousarray(blocks.slots[:, ::-1]))
    assert reader(swapped, layout) == [False, False]


def test_shards_of_different_length_are_a_miss() -> None:
    layout = LAYOUTS["gqa"]
    pools = random_pools(layout, 1, seed=1)
    long, short = new_blocks(layout, 1), new_blocks(layout, 1)
    kv_offload(pools, [0], [16], layout, long)
    kv_offload(pools, [0], [15], layout, short)
    long.memory[1] = short.memory[1]
    for backend in ("core", "torch"):
        assert by_restore(backend, "pool")(long, layout) == [False]


@pytest.mark.parametrize("name", ["core", "torch", "copy"])
@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(LAYOUTS)), st.data())
def test_every_flipped_bit_is_a_miss(name: str, layout_name: str, data: st.DataObject) -> None:
    layout = LAYOUTS[layout_name]
    blocks = written(layout, count=1)
    wire = WireLayout.of(layout)
    payload_end = wire.layer_offset(wire.num_layers)
    trailer = st.integers(wire.trailer_offset, wire.trailer_offset + 7)
    byte = data.draw(st.integers(0, payload_end - 1) | trailer)
    blocks.memory[blocks.slots[0, 0], byte] ^= 1 << data.draw(st.integers(0, 7))
    assert READERS[name](blocks, layout) == [False]


def test_a_copy_is_readable_under_its_own_generation_only(layout: KvLayout) -> None:
    blocks = written(layout)
    target = new_blocks(layout, 2, generation=100, order=[1, 0])
    assert block_copy(blocks, target, WireLayout.of(layout), threads=2) == [True, True]
    read = by_restore("core", "device")
    assert read(target, layout) == [True, True]
    stale = dataclasses.replace(target, generations=blocks.generations)
    assert read(stale, layout) == [False, False]
