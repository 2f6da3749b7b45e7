"""Same-host transport: the peer's pool is mapped read-only and copied in a thread."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from evolving_infra.kv.host_pool import HostPool
from evolving_infra.kv.pool_door import open_pool
from evolving_infra.kv.refs import host_blocks_of, is_inside
from evolving_infra.kv.transport.transport import BlockMove, ReadTicket
from evolving_infra.ops.block_copy import block_copy
from evolving_infra.ops.wire_block import WireLayout

PIECE_BYTES = 1 << 20
"""Copied between two looks at the cancel flag."""


class ShmTicket(ReadTicket):
    """A read that can be told to stop."""

    def __init__(self, drained: "Future[list[bool]]", stop: threading.Event) -> None:
        super().__init__(drained)
        self.stop = stop


class ShmTransport:
    """Reads peers' mapped pools into ``memory``, on ``threads`` threads for all reads."""

    def __init__(
        self, memory: NDArray[np.uint8], wire: WireLayout, secret: str, threads: int = 2
    ) -> None:
        self._memory = memory
        self._wire = wire
        self._secret = secret
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="shm-read")

    def open(self, address: str, timeout: float) -> HostPool:
        """Map the pool of the store at ``address`` read-only."""
        pool = open_pool(address, self._secret, wire=self._wire, timeout=timeout)
        pool.close()  # the mapping stays
        return pool

    def read(self, peer: HostPool, moves: Sequence[BlockMove]) -> ShmTicket:
        """Start to copy. A reference outside the peer's pool is a miss."""
        stop = threading.Event()
        future = self._executor.submit(self._copy, peer.memory, tuple(moves), stop)
        return ShmTicket(future, stop)

    def cancel(self, ticket: ReadTicket) -> None:
        assert isinstance(ticket, ShmTicket), "a ticket of this transport"
        ticket.stop.set()

    def close(self) -> None:
        """Wait for the copies in progress; they are short."""
        self._executor.shutdown()

    def _copy(
        self, source: NDArray[np.uint8], moves: tuple[BlockMove, ...], stop: threading.Event
    ) -> list[bool]:
        piece = max(1, PIECE_BYTES // (self._wire.slot_bytes * self._wire.shards))
        arrived: list[bool] = []
        for first in range(0, len(moves), piece):
            if stop.is_set():
                break
            arrived += self._copy_piece(source, moves[first : first + piece])
        return arrived + [False] * (len(moves) - len(arrived))

    def _copy_piece(self, source: NDArray[np.uint8], moves: tuple[BlockMove, ...]) -> list[bool]:
        shards = self._wire.shards
        legal = [is_inside(move.remote, len(source), shards) for move in moves]
        good = [move for move, inside in zip(moves, legal, strict=True) if inside]
        remote = host_blocks_of(source, [move.remote for move in good], shards)
        local = host_blocks_of(self._memory, [move.local for move in good], shards)
        copied = iter(block_copy(remote, local, self._wire))
        return [inside and next(copied) for inside in legal]
