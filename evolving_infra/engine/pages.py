"""Device pages: a free list, reference counts, and the prefix cache (L1) over them.

    free ── allocate ──> referenced ── give_back ──> cached (has a key) ── evicted ──> free
                             └──────── give_back ──> free   (has none)

A page under a hold (being copied to host memory) is in neither of the last two until released.
All operations are O(1) per page.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from evolving_infra.types import BlockKey


class PagePool:
    """Page numbers only; the memory is the same page of every pool of every rank and layer."""

    def __init__(self, num_pages: int) -> None:
        self._free = list(range(num_pages - 1, -1, -1))
        self._references = [0] * num_pages
        self._holds = [0] * num_pages
        self._key_of: list[BlockKey | None] = [None] * num_pages
        self._page_of: dict[BlockKey, int] = {}
        self._counted: set[BlockKey] = set()
        # Evictable pages, least recently used first: those no active branch needs, and the others.
        self._evictable: dict[bool, OrderedDict[int, None]] = {
            False: OrderedDict(),
            True: OrderedDict(),
        }
        self._added: dict[BlockKey, None] = {}
        self._evicted: dict[BlockKey, None] = {}

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def cached_pages(self) -> int:
        """Pages with a key, referenced or not."""
        return len(self._page_of)

    @property
    def held_pages(self) -> int:
        return sum(count > 0 for count in self._holds)

    @property
    def cached_keys(self) -> tuple[BlockKey, ...]:
        return tuple(self._page_of)

    def room(self, besides: Iterable[int] = ()) -> int:
        """Pages that ``allocate`` could give if those of ``besides`` were referenced."""
        total = len(self._free) + sum(map(len, self._evictable.values()))
        return total - sum(self._is_evictable(page) for page in besides)

    def match(self, keys: Sequence[BlockKey]) -> list[int]:
        """Pages of the longest cached prefix of ``keys``."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def take(self, pages: Iterable[int]) -> None:
        """Reference cached pages."""
        for page in pages:
            self._leave_evictable(page)
            self._references[page] += 1

    def allocate(self, count: int) -> list[int]:
        """``count`` referenced pages without a key; evicts uncounted, then least recently used."""
        assert count <= self.room(), "allocate is called only after asking for room"
        while len(self._free) < count:
            self._evict()
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def publish(self, page: int, key: BlockKey) -> bool:
        """Enter a referenced page into the cache. False if another page holds that block."""
        assert self._references[page], "only a page in use is published"
        assert self._key_of[page] is None, "a page is published once"
        if key in self._page_of:
            return False
        self._key_of[page] = key
        self._page_of[key] = page
        if key in self._evicted:
            del self._evicted[key]
        else:
            self._added[key] = None
        return True

    def give_back(self, pages: Sequence[int]) -> None:
        """Drop one reference each. The last page of a sequence is evicted before its first."""
        for page in reversed(pages):
            assert self._references[page] > 0, "a page is given back once per reference"
            self._references[page] -= 1
            self._settle(page)

    def hold(self, pages: Iterable[int]) -> None:
        """Pin pages until ``release``, whoever references them."""
        for page in pages:
            self._leave_evictable(page)
            self._holds[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        for page in pages:
            assert self._holds[page] > 0, "a page is released once per hold"
            self._holds[page] -= 1
            self._settle(page)

    def set_counted(self, keys: Iterable[BlockKey], counted: bool) -> None:
        """Tell which blocks active branches need. A change counts as an access."""
        for key in keys:
            if counted:
                self._counted.add(key)
            else:
                self._counted.discard(key)
            page = self._page_of.get(key)
            if page is not None and self._is_evictable(page):
                self._leave_evictable(page)
                self._settle(page)

    def flush(self) -> tuple[BlockKey, ...]:
        """Evict all that can be; returns the keys, which ``drain`` then does not report."""
        keys = []
        while any(self._evictable.values()):
            keys.append(self._evict())
        for key in keys:
            self._evicted.pop(key, None)
        return tuple(keys)

    def drain(self) -> tuple[tuple[BlockKey, ...], tuple[BlockKey, ...]]:
        """Keys added and evicted since the last call, without those that came and went."""
        added, evicted = tuple(self._added), tuple(self._evicted)
        self._added, self._evicted = {}, {}
        return added, evicted

    def _evict(self) -> BlockKey:
        order = self._evictable[False] or self._evictable[True]
        page, _ = order.popitem(last=False)
        key = self._key_of[page]
        assert key is not None, "only pages with a key are evictable"
        self._key_of[page] = None
        del self._page_of[key]
        if key in self._added:
            del self._added[key]
        else:
            self._evicted[key] = None
        self._free.append(page)
        return key

    def _settle(self, page: int) -> None:
        """Make a page evictable, or free, if nobody needs it any more."""
        if self._references[page] or self._holds[page]:
            return
        key = self._key_of[page]
        if key is None:
            self._free.append(page)
        else:
            self._evictable[key in self._counted][page] = None

    def _is_evictable(self, page: int) -> bool:
        return any(page in order for order in self._evictable.values())

    def _leave_evictable(self, page: int) -> None:
        for order in self._evictable.values():
            order.pop(page, None)
