"""Readers while the owner rewrites the slot: a hit is always one whole block, never a mixture."""

import dataclasses
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from evolving_infra.ops.block_copy import block_copy
from evolving_infra.ops.host_blocks import HostBlocks
from evolving_infra.ops.kv_offload import kv_offload
from evolving_infra.ops.kv_restore import kv_restore
from evolving_infra.ops.reference.record import write_record
from evolving_infra.ops.wire_block import HEADER_BYTES, WireHeader, WireLayout
from evolving_infra.types import KvLayout
from tests.test_ops_samples import MLA, WIDE, Pools, new_blocks

WIRE = WireLayout.of(WIDE)
ENOUGH = 10
"""Hits and misses that a race must have seen before it counts."""
MOST_READS = 20_000
RACE = dataclasses.replace(MLA, page_size=1024, row=256, tp_size=1)
"""One shard, of 1.5 MiB: shards of two writes as one generation would be a hit."""
LONG = dataclasses.replace(MLA, num_layers=8, page_size=4096, row=512, tp_size=1)
"""A record of 32 MiB: its copy takes long enough to do something in the middle of it."""
MOST_TRIES = 100


def constant_pools(layout: KvLayout, value: int) -> Pools:
    shape = (1, layout.page_size, layout.row)
    return [
        [torch.full(shape, value, dtype=torch.bfloat16) for _ in range(layout.num_layers)]
        for _ in range(layout.tp_size)
    ]


Words = NDArray[np.uint16]
Reader = Callable[[HostBlocks], tuple[bool, set[int]]]


def words_of(pools: Pools) -> list[Words]:
    return [layer.view(torch.uint16).numpy().reshape(-1) for rank in pools for layer in rank]


def extremes(words: list[Words]) -> set[int]:
    return {int(value) for part in words for value in (part.min(), part.max())}


def payload_of(blocks: HostBlocks, layout: KvLayout) -> Words:
    """The words of the only record."""
    wire = WireLayout.of(layout)
    return blocks.memory[0, HEADER_BYTES : wire.layer_offset(wire.num_layers)].view(np.uint16)


def by_restore() -> Reader:
    """Whether it was a hit, and the least and largest word read; 0 if there was nothing to read."""
    target = constant_pools(RACE, 0)

    def read(blocks: HostBlocks) -> tuple[bool, set[int]]:
        for words in words_of(target):
            words[:] = 0
        return kv_restore(blocks, target, [0], RACE) != [0], extremes(words_of(target))

    return read


def by_copy() -> Reader:
    copied, wire = new_blocks(RACE, 1), WireLayout.of(RACE)

    def read(blocks: HostBlocks) -> tuple[bool, set[int]]:
        copied.memory[:] = 0
        hit = block_copy(blocks, copied, wire) == [True]
        return hit, extremes([payload_of(copied, RACE)])

    return read


@pytest.mark.parametrize("reader", [by_restore, by_copy], ids=["restore", "copy"])
def test_hits_are_whole_blocks(reader: Callable[[], Reader]) -> None:
    """The writer goes on writing all ones and all twos, always as the same generation."""
    slot, stop, read = new_blocks(RACE, 1), threading.Event(), reader()
    contents = [constant_pools(RACE, value) for value in (1, 2)]
    one, two = (int(words_of(pools)[0][0]) for pools in contents)

    def write() -> None:
        for pools in itertools.cycle(contents):
            kv_offload(pools, [0], [RACE.page_size], RACE, slot)
            if stop.is_set():
                return

    writer = threading.Thread(target=write)
    writer.start()
    whole = missed = 0
    try:
        for _ in range(MOST_READS):
            hit, values = read(slot)
            assert not hit or values in ({one}, {two}), "a hit is one block"
            whole += hit
            missed += not hit
            if min(whole, missed) >= ENOUGH:
                break
    finally:
        stop.set()
        writer.join()
    assert min(whole, missed) >= ENOUGH, f"{whole} hits and {missed} misses prove nothing"
    assert read(slot)[0]


def in_the_middle(start: Callable[[], object], watched: Words, act: Callable[[], None]) -> object:
    """Call ``start`` in a thread and ``act`` once it has begun, and not yet ended, to copy.

    ``watched`` are the words it writes, first to last; none is zero afterwards. Tries again if
    the copy was over too soon.
    """
    with ThreadPoolExecutor(1) as executor:
        for _ in range(MOST_TRIES):
            watched[[0, -1]] = 0
            done: Future[object] = executor.submit(start)
            while not watched[0] and not done.done():
                pass
            act()
            in_time = not watched[-1]
            result = done.result()
            if in_time:
                return result
    raise AssertionError("no copy was met in its middle")


def long_block(value: int, generation: int = 7) -> tuple[HostBlocks, Pools]:
    blocks, pools = new_blocks(LONG, 1, generation=generation), constant_pools(LONG, value)
    kv_offload(pools, [0], [LONG.page_size], LONG, blocks)
    return blocks, pools


def withdraw(record: NDArray[np.uint8]) -> None:
    """Payload and checksum stay the old ones, and so does every word that was copied."""
    record[:8] = 0


def rewrite(record: NDArray[np.uint8]) -> None:
    """The end becomes another write's, of the same generation: the header is the old one."""
    end = WireLayout.of(LONG).layer_offset(LONG.num_layers)
    record[end - 64 : end] = 2


@pytest.mark.parametrize("change", [withdraw, rewrite])
@pytest.mark.parametrize("reader", ["restore", "copy"])
def test_a_block_that_changes_while_it_is_read_is_a_miss(
    reader: str, change: Callable[[NDArray[np.uint8]], None]
) -> None:
    blocks, _ = long_block(1)
    whole = blocks.memory[0].copy()
    target, copied = constant_pools(LONG, 0), new_blocks(LONG, 1)

    def read() -> bool:
        blocks.memory[0] = whole
        if reader == "restore":
            return kv_restore(blocks, target, [0], LONG) != [0]
        return block_copy(blocks, copied, WireLayout.of(LONG)) != [False]

    watched = words_of(target)[0] if reader == "restore" else payload_of(copied, LONG)
    assert in_the_middle(read, watched, lambda: change(blocks.memory[0])) is False
    assert read(), "nothing else was wrong with it"


@pytest.mark.parametrize("writer", ["offload", "copy"])
def test_a_slot_is_no_block_while_it_is_written(writer: str) -> None:
    """Old and new block are the same: only the magic says that it is being written."""
    blocks, pools = long_block(1)
    source, _ = long_block(1)
    seen: list[bool] = []

    def write() -> None:
        if writer == "offload":
            kv_offload(pools, [0], [LONG.page_size], LONG, blocks)
        else:
            assert block_copy(source, blocks, WireLayout.of(LONG)) == [True]

    def look() -> None:
        seen.append(bool(blocks.memory[0, :8].any()))

    in_the_middle(write, payload_of(blocks, LONG), look)
    assert seen[-1] is False
    assert blocks.memory[0, :8].any()


def hit(blocks: HostBlocks, reader: str) -> bool:
    if reader == "copy":
        return block_copy(blocks, new_blocks(WIDE, 1, generation=1), WIRE) == [True]
    target = constant_pools(WIDE, 9)
    return kv_restore(blocks, target, [0], WIDE, backend=reader) != [0]


def records(slot: HostBlocks) -> tuple[HostBlocks, HostBlocks]:
    """The slot's references as generations 7 and 8."""
    new = dataclasses.replace(slot, generations=np.full_like(slot.generations, 8))
    return slot, new


@pytest.mark.parametrize("cleared", [True, False], ids=["magic cleared", "magic left"])
@pytest.mark.parametrize("same", [True, False], ids=["same generation", "next generation"])
@pytest.mark.parametrize("reader", ["core", "torch", "copy"])
def test_a_writer_may_stop_anywhere(reader: str, same: bool, cleared: bool) -> None:
    """By hand in the documented order: magic cleared, payload, checksum, header, magic.

    A writer that forgot to clear the magic is found out as long as its payload is not whole.
    """
    old, new = records(new_blocks(WIDE, 1))
    new = old if same else new
    kv_offload(constant_pools(WIDE, 1), [0], [WIDE.page_size], WIDE, old)
    row = old.memory[old.slots[0, -1]]
    last = WIDE.shards - 1
    header = WireHeader(
        digest=WIRE.digest,
        key=old.keys[0],
        generation=int(new.generations[0, last]),
        token_count=WIDE.page_size,
        shard=last,
    )
    written = row.copy()
    twos = np.full(WIRE.layer_offset(WIRE.num_layers) - HEADER_BYTES, 2, dtype=np.uint8)
    write_record(written, header, twos, WIRE)
    other_shards = [old.memory[slot].copy() for slot in old.slots[0, :-1]]
    kv_offload(constant_pools(WIDE, 2), [0], [WIDE.page_size], WIDE, new)
    new_shards = [old.memory[slot].copy() for slot in old.slots[0, :-1]]
    kv_offload(constant_pools(WIDE, 1), [0], [WIDE.page_size], WIDE, old)

    def assert_no_hit() -> None:
        """As neither block, whatever the other shards are."""
        for blocks, shards in ((old, other_shards), (new, new_shards)):
            for slot, record in zip(old.slots[0, :-1], shards, strict=True):
                old.memory[slot] = record
            assert not hit(blocks, reader)

    assert hit(old, reader)
    end = WIRE.trailer_offset
    edges = [HEADER_BYTES, HEADER_BYTES + 4, end // 8 * 4, end - 4, end]
    if cleared:
        row[:8] = 0
        assert_no_hit()
    for first, after in itertools.pairwise(edges):
        row[first:after] = written[first:after]
        assert_no_hit()
    if not cleared:
        return
    for first, after in ((end, end + 4), (end + 4, end + 8), (8, 64), (64, HEADER_BYTES)):
        row[first:after] = written[first:after]
        assert_no_hit()
    row[:8] = written[:8]
    assert hit(new, reader)


def test_a_copy_that_failed_leaves_no_record_in_its_slot() -> None:
    """Also not the valid one that was there before."""
    source, target = new_blocks(WIDE, 1), new_blocks(WIDE, 1)
    for blocks in (source, target):
        kv_offload(constant_pools(WIDE, 1), [0], [WIDE.page_size], WIDE, blocks)
    source.memory[:, :8] = 0
    assert block_copy(source, target, WIRE) == [False]
    assert not hit(target, "core")
