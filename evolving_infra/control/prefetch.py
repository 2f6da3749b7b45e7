"""Copies of what decode nodes produced, made at a branch's prefill home while its tools run.

What no L2 has yet is remembered as wanted, because a decode node's last blocks reach its host
memory shortly after the request's end.
"""

from collections.abc import Iterable, Sequence

from evolving_infra.control.commands import Prefetch
from evolving_infra.control.directory import Directory
from evolving_infra.types import BlockKey, Tier

MAX_WANTED = 100_000


class PrefetchWants:
    """Which idle branches wait for which blocks. Bounded: beyond it new wishes are dropped."""

    def __init__(self, max_wanted: int = MAX_WANTED) -> None:
        self._by_key: dict[BlockKey, dict[str, None]] = {}
        self._by_branch: dict[str, dict[BlockKey, None]] = {}
        self._size = 0
        self._max_wanted = max_wanted

    def __len__(self) -> int:
        return self._size

    def add(self, branch: str, keys: Iterable[BlockKey]) -> None:
        """``branch`` wants these blocks as soon as some L2 has them."""
        for key in keys:
            if self._size >= self._max_wanted:
                return
            wanted = self._by_branch.setdefault(branch, {})
            if key not in wanted:
                wanted[key] = None
                self._by_key.setdefault(key, {})[branch] = None
                self._size += 1

    def take(self, key: BlockKey) -> tuple[str, ...]:
        """Branches that wanted the block, in order; it is no longer wanted."""
        branches = tuple(self._by_key.pop(key, ()))
        for branch in branches:
            del self._by_branch[branch][key]
            if not self._by_branch[branch]:
                del self._by_branch[branch]
        self._size -= len(branches)
        return branches

    def drop(self, branch: str) -> None:
        """``branch`` waits for nothing any more."""
        for key in self._by_branch.pop(branch, ()):
            del self._by_key[key][branch]
            if not self._by_key[key]:
                del self._by_key[key]
            self._size -= 1

    def check(self, idle: set[str]) -> None:
        """Assert that only idle branches want something and that both directions agree."""
        assert self._by_branch.keys() <= idle, "only an idle branch wants blocks"
        pairs = {(branch, key) for branch, keys in self._by_branch.items() for key in keys}
        assert pairs == {(b, key) for key, bs in self._by_key.items() for b in bs}, "one-way wish"
        assert len(pairs) == self._size, "wishes are miscounted"


def missing_at(directory: Directory, node: str, keys: Iterable[BlockKey]) -> list[BlockKey]:
    """Blocks that are in neither tier of ``node``."""
    return [
        key
        for key in keys
        if not directory.holds(node, Tier.L1, key) and not directory.holds(node, Tier.L2, key)
    ]


def plan_prefetch(
    directory: Directory, branch: str, node: str, keys: Sequence[BlockKey], *, prefer: str | None
) -> tuple[list[Prefetch], list[BlockKey]]:
    """Copies that bring ``keys`` to ``node``, one a source, and the keys that no L2 has.

    A block is read from ``prefer`` if that has it, else from the holder of smallest id.
    """
    by_source: dict[str, list[BlockKey]] = {}
    nowhere: list[BlockKey] = []
    for key in keys:
        holders = directory.holders(key)
        if not holders:
            nowhere.append(key)
        else:
            source = prefer if prefer is not None and prefer in holders else holders[0]
            by_source.setdefault(source, []).append(key)
    commands = [
        Prefetch(node=node, source=source, branch=branch, keys=tuple(found))
        for source, found in sorted(by_source.items())
    ]
    return commands, nowhere
