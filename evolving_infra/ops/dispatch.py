"""Which implementation of an op runs. A named backend never falls back."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from evolving_infra._core import WireShape
from evolving_infra.errors import BackendMissing, wrong
from evolving_infra.ops.wire_block import WireLayout

if TYPE_CHECKING:
    from torch import Tensor

BACKENDS = ("auto", "core", "torch")


def choose_backend(backend: str, pools: Sequence[Sequence[Tensor]]) -> str:
    """``core`` (native, host memory only) or ``torch`` (the reference, any device).

    Raises:
        InputError: unknown name.
        BackendMissing: ``core`` was named but a pool is not in host memory.
    """
    if backend not in BACKENDS:
        raise wrong("backend", f"one of {', '.join(BACKENDS)}", backend)
    device = next((t.device for rank in pools for t in rank if t.device.type != "cpu"), None)
    if backend == "core" and device is not None:
        raise BackendMissing(
            f"backend core moves host memory only, a pool is on {device}: use auto"
        )
    if backend == "auto":
        return "core" if device is None else "torch"
    return backend


@functools.lru_cache(maxsize=64)
def core_shape(wire: WireLayout) -> WireShape:
    """The native core's view of a layout."""
    shape = WireShape(wire.digest, wire.num_layers, wire.page_bytes, wire.page_size)
    assert shape.slot_bytes == wire.slot_bytes, "both sides agree on the record"
    return shape


def pool_addresses(pools: Sequence[Sequence[Tensor]]) -> list[list[int]]:
    """First byte of every layer's pool on every rank."""
    return [[pool.data_ptr() for pool in layers] for layers in pools]
