"""Readers while the owner rewrites the slot: a hit is always one whole block, never a mixture."""

import dataclasses
import threading

import numpy as np
import torch

from evolving_infra.ops.block_copy import block_copy
from evolving_infra.ops.host_blocks import HostBlocks
from evolving_infra.ops.kv_offload import kv_offload
from evolving_infra.ops.kv_restore import kv_restore
from evolving_infra.ops.wire_block import WireLayout
from tests.test_ops_samples import WIDE, Pools, new_blocks

ROUNDS = 400


def constant_pools(value: int) -> Pools:
    shape = (1, WIDE.page_size, WIDE.row)
    return [
        [torch.full(shape, value, dtype=torch.bfloat16) for _ in range(WIDE.num_layers)]
        for _ in range(WIDE.tp_size)
    ]


def of_generation(blocks: HostBlocks, generation: int) -> HostBlocks:
    generations = np.full_like(blocks.generations, generation)
    return dataclasses.replace(blocks, generations=generations)


def test_hits_are_whole_blocks() -> None:
    """Generation g holds the value g % 64 everywhere; the writer goes on while we read."""
    slot = new_blocks(WIDE, 1)
    written = [0]

    def write() -> None:
        for generation in range(1, ROUNDS + 1):
            blocks = of_generation(slot, generation)
            kv_offload(constant_pools(generation % 64), [0], [64], WIDE, blocks)
            written[0] = generation

    writer = threading.Thread(target=write)
    writer.start()
    target, wire = constant_pools(-1), WireLayout.of(WIDE)
    copied = new_blocks(WIDE, 1, generation=5)
    while writer.is_alive():
        generation = written[0]
        blocks = of_generation(slot, generation)
        if kv_restore(blocks, target, [0], WIDE) == [64]:
            assert all((layer == generation % 64).all() for rank in target for layer in rank)
        if block_copy(blocks, copied, wire) == [True]:
            assert kv_restore(copied, target, [0], WIDE) == [64]
            assert all((layer == generation % 64).all() for rank in target for layer in rank)
    writer.join()
    assert kv_restore(of_generation(slot, ROUNDS), target, [0], WIDE) == [64]
