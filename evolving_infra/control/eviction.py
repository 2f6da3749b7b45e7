"""In which order a node's host memory gives blocks up. Keys are opaque hashables.

``counted`` (design section 7): by (count > 0, last access), so blocks that no active branch needs
go first, and if everything is needed the least recently used one goes. ``lru`` ignores counts.
"""

import heapq
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, Protocol, TypeVar

from evolving_infra.errors import StateError, wrong

Key = TypeVar("Key", bound=Hashable)

Rank = tuple[float, int]
"""(last access, sequence): a total order, ties by who came first."""


class Order(Protocol[Key]):
    """What a store needs of an eviction order. ``now`` is seconds, never going back."""

    def add(self, key: Key, now: float) -> None:
        """A block is there now. ``StateError`` if it was already."""

    def touch(self, key: Key, now: float) -> None:
        """A block was used. ``StateError`` if it is not there."""

    def remove(self, key: Key) -> None:
        """A block is gone. ``StateError`` if it was not there."""

    def set_counted(self, key: Key, counted: bool) -> None:
        """Some active branch needs the block, or none does. Legal for blocks that are not there."""

    def victims(self) -> Iterator[Key]:
        """Blocks in the order in which they should go; lazy, changes nothing.

        While iterating, ``remove`` is legal; after any other change take a new iterator.
        """


class EvictionOrder(Generic[Key]):
    """Order by (count > 0, last access).

    Two heaps with lazy deletion. ``add`` and ``touch`` push the largest rank, so they are O(1)
    amortised; ``remove`` is O(1); ``set_counted`` keeps the last access and is O(log n); the first
    k victims cost O(k log k), plus stale ranks, of which there are never more than live ones + 64.
    """

    def __init__(self) -> None:
        self._ranks: dict[Key, Rank] = {}
        self._counted: set[Key] = set()
        self._heaps: tuple[list[tuple[Rank, Key]], list[tuple[Rank, Key]]] = ([], [])
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._ranks)

    def add(self, key: Key, now: float) -> None:
        """A block is there now. ``StateError`` if it was already."""
        if key in self._ranks:
            raise StateError(f"block {key!r} is already in the eviction order")
        self._put(key, now)

    def touch(self, key: Key, now: float) -> None:
        """A block was used. ``StateError`` if it is not there."""
        self._require(key)
        self._put(key, now)

    def remove(self, key: Key) -> None:
        """A block is gone; whether it is counted is remembered. ``StateError`` if not there."""
        self._require(key)
        del self._ranks[key]

    def set_counted(self, key: Key, counted: bool) -> None:
        """Move the block between the classes; its last access stays."""
        if (key in self._counted) == counted:
            return
        if counted:
            self._counted.add(key)
        else:
            self._counted.discard(key)
        rank = self._ranks.get(key)
        if rank is not None:
            self._push(key, rank)

    def victims(self) -> Iterator[Key]:
        """Uncounted blocks by last access, then counted ones. See ``Order.victims``."""
        for counted in (False, True):
            heap = self._heaps[counted]
            while heap and not self._is_live(heap[0], counted):
                heapq.heappop(heap)
            last: Rank | None = None
            for entry in _in_order(heap):
                if entry[0] != last and self._is_live(entry, counted):
                    last = entry[0]  # a block that changed class twice is in the heap twice
                    yield entry[1]

    def _require(self, key: Key) -> None:
        if key not in self._ranks:
            raise StateError(f"block {key!r} is not in the eviction order")

    def _put(self, key: Key, now: float) -> None:
        self._sequence += 1
        self._ranks[key] = (now, self._sequence)
        self._push(key, self._ranks[key])

    def _push(self, key: Key, rank: Rank) -> None:
        counted = key in self._counted
        heap = self._heaps[counted]
        if len(heap) > 2 * len(self._ranks) + 64:
            heap[:] = {e[0]: e for e in heap if self._is_live(e, counted)}.values()
            heapq.heapify(heap)
        heapq.heappush(heap, (rank, key))

    def _is_live(self, entry: tuple[Rank, Key], counted: bool) -> bool:
        rank, key = entry
        return self._ranks.get(key) == rank and (key in self._counted) == counted


class LruOrder(EvictionOrder[Key]):
    """Plain least recently used: the baseline that the counts are compared with."""

    def set_counted(self, key: Key, counted: bool) -> None:
        """Counts are ignored."""


def _in_order(heap: list[tuple[Rank, Key]]) -> Iterator[tuple[Rank, Key]]:
    """Entries of a heap from the smallest on, without changing it. O(k log k) for the first k."""
    frontier = [(heap[0], 0)] if heap else []
    while frontier:
        entry, index = heapq.heappop(frontier)
        yield entry
        for child in (2 * index + 1, 2 * index + 2):
            if child < len(heap):
                heapq.heappush(frontier, (heap[child], child))


def eviction_order(name: str) -> Order[bytes]:
    """An empty order by its configured name. ``InputError`` if there is none of this name."""
    kinds: dict[str, Callable[[], Order[bytes]]] = {"counted": EvictionOrder, "lru": LruOrder}
    if name not in kinds:
        raise wrong("eviction", f"one of {', '.join(kinds)}", name)
    return kinds[name]()
