"""How blocks get from a peer's L2 into this node's: one interface for all transports."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from evolving_infra.kv.slots import BlockRef


@dataclass(frozen=True, slots=True)
class BlockMove:
    """Read the block at ``remote`` in the peer's pool into the reserved slots ``local``."""

    remote: BlockRef
    local: BlockRef


class ReadTicket:
    """A read in progress.

    ``drained`` resolves when nothing writes to the local slots any more, to one flag per move:
    whether the block arrived and was verified. It resolves after a cancel too.
    """

    def __init__(self, drained: "Future[list[bool]]") -> None:
        self.drained = drained


class Transport(Protocol):
    """One way to read from peers. ``open`` and the copies run in threads."""

    def open(self, address: str, timeout: float) -> Any:
        """A session with the store at ``address``; blocks up to about ``timeout`` seconds.

        ``PeerError`` if there is none to be had.
        """

    def read(self, peer: Any, moves: Sequence[BlockMove]) -> ReadTicket:
        """Start to read; returns at once. ``peer`` is what ``open`` returned."""

    def cancel(self, ticket: ReadTicket) -> None:
        """Stop as soon as possible; the local slots are safe only once ``drained`` resolves."""

    def close(self) -> None:
        """Wait for the reads in progress and stop."""
