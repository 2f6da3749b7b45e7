"""Which transport a store uses to read from its peers."""

import numpy as np
from numpy.typing import NDArray

from evolving_infra.errors import BackendMissing, wrong
from evolving_infra.kv.transport.shm import ShmTransport
from evolving_infra.kv.transport.transport import Transport
from evolving_infra.ops.wire_block import WireLayout

MISSING = {
    "tcp": "stores on other hosts can't be read yet; use shm with all nodes on this host",
    "mooncake": "RDMA transfer is not built in yet; use shm with all nodes on this host",
}


def choose_transport(
    name: str, memory: NDArray[np.uint8], wire: WireLayout, secret: str
) -> Transport:
    """The named transport, reading into ``memory``.

    Raises:
        InputError: unknown name.
        BackendMissing: it can't run here; the text says why.
    """
    if name in MISSING:
        raise BackendMissing(f"transport {name}: {MISSING[name]}")
    if name != "shm":
        raise wrong("transport", f"one of shm, {', '.join(MISSING)}", name)
    return ShmTransport(memory, wire, secret)
