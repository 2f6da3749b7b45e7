"""What a node's store needs of the order in which it gives blocks up.

Stated here too because ``kv`` and ``control``, whose orders fit it, don't import each other.
"""

from collections.abc import Iterator
from typing import Protocol

from evolving_infra.types import BlockKey


class BlockOrder(Protocol):
    """Order over the committed blocks. ``now`` is seconds, never going back."""

    def add(self, key: BlockKey, now: float) -> None:
        """A block was committed."""

    def touch(self, key: BlockKey, now: float) -> None:
        """A committed block was used."""

    def remove(self, key: BlockKey) -> None:
        """A committed block is gone."""

    def set_counted(self, key: BlockKey, counted: bool) -> None:
        """Some active branch needs the block, or none does; also told of blocks not (yet) here."""

    def victims(self) -> Iterator[BlockKey]:
        """Committed blocks, the first to go first. Lazy; changes nothing."""
