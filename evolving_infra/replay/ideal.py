"""What a cache without limits would reuse, in blocks of the engine's page size."""

from collections.abc import Sequence

ROOT = 0


class IdealCache:
    """Every block whose KV some request has produced, as a tree of blocks. Never forgets.

    A block is identified by its tokens and the block before it, exactly, so nothing can clash.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._children: dict[tuple[int, tuple[int, ...]], int] = {}

    def produced(self, tokens: Sequence[int]) -> None:
        """The KV of ``tokens`` exists now: its complete blocks can be reused. O(tokens)."""
        node = ROOT
        for page in self._pages(tokens, len(tokens) // self._page_size):
            node = self._children.setdefault((node, page), len(self._children) + 1)

    def reusable(self, tokens: Sequence[int]) -> int:
        """Tokens of the longest known prefix. The last token is always computed. O(tokens)."""
        node, blocks = ROOT, 0
        for page in self._pages(tokens, (len(tokens) - 1) // self._page_size):
            child = self._children.get((node, page))
            if child is None:
                break
            node, blocks = child, blocks + 1
        return blocks * self._page_size

    def _pages(self, tokens: Sequence[int], count: int) -> list[tuple[int, ...]]:
        size = self._page_size
        return [tuple(tokens[index * size : (index + 1) * size]) for index in range(count)]
