"""Pools in CUDA memory: the same records and the same pages as in host memory."""

import numpy as np
import pytest
import torch

from evolving_infra.errors import BackendMissing
from evolving_infra.ops.kv_offload import kv_offload
from evolving_infra.ops.kv_restore import kv_restore
from tests.test_ops_samples import LAYOUTS, Pools, new_blocks, page_is_same, random_pools

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def moved(pools: Pools, device: str) -> Pools:
    return [[layer.to(device) for layer in rank] for rank in pools]


@pytest.mark.parametrize("name", LAYOUTS)
def test_device_pools_round_trip(name: str) -> None:
    layout = LAYOUTS[name]
    pools = random_pools(layout, 4, seed=1)
    on_host, on_device = new_blocks(layout, 2), new_blocks(layout, 2)
    counts = [layout.page_size, 1]
    kv_offload(pools, [3, 0], counts, layout, on_host)
    kv_offload(moved(pools, "cuda"), [3, 0], counts, layout, on_device)
    assert np.array_equal(on_host.memory, on_device.memory)
    target = moved(random_pools(layout, 4, seed=2), "cuda")
    assert kv_restore(on_device, target, [1, 2], layout, verify="device") == counts
    back = moved(target, "cpu")
    assert page_is_same(pools, 3, back, 1)
    assert page_is_same(pools, 0, back, 2)
    zeroed = kv_restore(on_device, target, [1, 2], layout, verify="device", fault="zero_restore")
    assert zeroed == [0, 0]
    with pytest.raises(BackendMissing):
        kv_restore(on_device, target, [1, 2], layout, backend="core")
