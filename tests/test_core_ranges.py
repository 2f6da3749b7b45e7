"""The native core refuses what would touch memory outside its arrays, whoever calls it."""

from typing import Any

import numpy as np
import pytest

from evolving_infra import _core
from evolving_infra.ops.dispatch import core_shape, pool_addresses
from evolving_infra.ops.wire_block import WireLayout
from tests.test_ops_samples import LAYOUTS, MLA, new_blocks, random_pools

WIRE = WireLayout.of(MLA)


def pack_arguments(**changes: Any) -> dict[str, Any]:
    blocks = new_blocks(MLA, 2)
    arguments = {
        "shape": core_shape(WIRE),
        "memory": blocks.memory,
        "keys": b"".join(blocks.keys),
        "slots": blocks.slots,
        "generations": blocks.generations,
        "pools": pool_addresses(random_pools(MLA, 4, 0)),
        "pages": np.array([0, 3], dtype=np.int64),
        "num_pages": 4,
        "token_counts": np.array([16, 16], dtype=np.uint32),
        "threads": 1,
    }
    return {**arguments, **changes}


def column(*values: int, dtype: Any = np.int64) -> Any:
    return np.array(values, dtype=dtype)[:, None]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"slots": column(0, 2)}, "slots: out of range"),
        ({"slots": column(-1, 0)}, "slots: out of range"),
        ({"pages": np.array([0, 4])}, "pages: out of range"),
        ({"pages": np.array([-1, 0])}, "pages: out of range"),
        ({"pages": np.array([0])}, "pages: expected one per block"),
        ({"keys": b"short"}, "keys: expected 32 bytes per block"),
        ({"generations": column(1, dtype=np.uint64)}, "generations: expected the shape of slots"),
        ({"pools": []}, "pools: expected at least one rank"),
        ({"pools": [[1], [1]]}, "pools: expected one address per layer"),
        ({"token_counts": np.array([1], dtype=np.uint32)}, "token_counts: expected one per block"),
        ({"memory": np.zeros((2, 64), np.uint8)}, "slot_bytes differs"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_arguments_are_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        _core.pack_blocks(**pack_arguments(**changes))


def test_good_arguments_are_taken() -> None:
    arguments = pack_arguments()
    _core.pack_blocks(**arguments)
    assert arguments["memory"].any(), "a record was written"


def test_read_only_memory_is_refused() -> None:
    arguments = pack_arguments()
    arguments["memory"].flags.writeable = False
    with pytest.raises(ValueError, match="not writeable"):
        _core.pack_blocks(**arguments)


@pytest.mark.parametrize("name", LAYOUTS)
def test_both_sides_agree_on_the_record(name: str) -> None:
    wire = WireLayout.of(LAYOUTS[name])
    shape = core_shape(wire)
    assert (shape.trailer_offset, shape.slot_bytes) == (wire.trailer_offset, wire.slot_bytes)
    assert wire.slot_bytes % 64 == 0
