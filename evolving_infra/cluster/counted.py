"""Which blocks of this node active branches need, as the controller says it.

A controller that connects sends the full set (``reset``), so what an earlier one counted is
forgotten; after that it sends changes.
"""

from collections.abc import Callable, Iterable

from evolving_infra.cluster.messages import split_keys
from evolving_infra.kv.channel import Fields
from evolving_infra.types import BlockKey

SetCounted = Callable[[Iterable[BlockKey], bool], object]


class CountedBlocks:
    """Passes changes on to ``set_counted(keys, counted)``."""

    def __init__(self, set_counted: SetCounted) -> None:
        self._set_counted = set_counted
        self._keys: set[BlockKey] = set()

    def told(self, fields: Fields) -> None:
        """Take in a ``counted`` message."""
        counted, uncounted = split_keys(fields["counted"]), split_keys(fields["uncounted"])
        if fields["reset"]:
            uncounted = tuple(sorted(self._keys.difference(counted)))
        self._keys.difference_update(uncounted)
        self._keys.update(counted)
        self._set_counted(uncounted, False)
        self._set_counted(counted, True)
