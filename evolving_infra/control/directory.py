"""Which nodes hold a copy of each block, and in which tier.

Keys are chain digests (design section 5), so a block implies every block before it. The interface
is narrow on purpose: a C++ index can stand behind it (design section 7).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from evolving_infra.types import BlockKey, Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """What exists of one chain, in blocks.

    Attributes:
        l1, l2: node -> how many leading blocks it holds in that tier; absent means 0.
        holders: one entry for each leading block that is in some L2 or continues some node's L1
            prefix: the nodes whose L2 has it, in order of id; empty if only an L1 has it.
    """

    l1: dict[str, int]
    l2: dict[str, int]
    holders: tuple[tuple[str, ...], ...]


class Directory:
    """Copies by block. One bit for each (node, tier) in a mask for each key."""

    def __init__(self) -> None:
        self._places: list[tuple[str, Tier]] = []
        self._bits: dict[tuple[str, Tier], int] = {}
        self._masks: dict[BlockKey, int] = {}
        self._held: dict[tuple[str, Tier], set[BlockKey]] = {}
        self._l2_bits = 0

    def store(self, node: str, tier: Tier, keys: Iterable[BlockKey]) -> None:
        """Note copies; known ones change nothing. O(1) a key."""
        bit, held = self._place(node, tier)
        for key in keys:
            self._masks[key] = self._masks.get(key, 0) | bit
            held.add(key)

    def remove(self, node: str, tier: Tier, keys: Iterable[BlockKey]) -> None:
        """Forget copies; unknown ones change nothing. O(1) a key."""
        bit, held = self._place(node, tier)
        for key in keys:
            if key in held:
                held.discard(key)
                self._clear(key, bit)

    def drop_node_tier(self, node: str, tier: Tier) -> int:
        """Forget every copy ``node`` has in ``tier``; returns how many. O(copies dropped)."""
        bit, held = self._place(node, tier)
        for key in held:
            self._clear(key, bit)
        dropped = len(held)
        held.clear()
        return dropped

    def match(self, keys: Sequence[BlockKey]) -> Match:
        """Prefixes of a chain. O(length of the longest prefix), not O(length of the chain)."""
        lengths: dict[int, int] = {}
        holders: list[tuple[str, ...]] = []
        alive, last = -1, 0
        names: tuple[str, ...] = ()
        for index, key in enumerate(keys):
            mask = self._masks.get(key, 0)
            ended = alive & ~mask if index else 0
            alive &= mask
            self._note_ends(ended, index, lengths)
            if not mask & self._l2_bits and not alive:
                break
            if mask != last:
                names, last = self._l2_names(mask), mask
            holders.append(names)
        if alive > 0:
            self._note_ends(alive, len(keys), lengths)
        prefixes: dict[Tier, dict[str, int]] = {Tier.L1: {}, Tier.L2: {}}
        for position, length in sorted(lengths.items()):
            node, tier = self._places[position]
            prefixes[tier][node] = length
        return Match(l1=prefixes[Tier.L1], l2=prefixes[Tier.L2], holders=tuple(holders))

    def holders(self, key: BlockKey) -> tuple[str, ...]:
        """Nodes whose L2 has the block, in order of id."""
        return self._l2_names(self._masks.get(key, 0))

    def holds(self, node: str, tier: Tier, key: BlockKey) -> bool:
        """True if ``node`` has the block in ``tier``."""
        return key in self._held.get((node, tier), ())

    def count(self, node: str, tier: Tier) -> int:
        """Blocks ``node`` has in ``tier``."""
        return len(self._held.get((node, tier), ()))

    def keys_at(self, node: str, tier: Tier) -> frozenset[BlockKey]:
        """All blocks ``node`` has in ``tier``. O(copies): for status, not for decisions."""
        return frozenset(self._held.get((node, tier), ()))

    def check(self) -> None:
        """Assert that masks and per-node sets say the same. O(copies)."""
        masks: dict[BlockKey, int] = {}
        for place, held in self._held.items():
            for key in held:
                masks[key] = masks.get(key, 0) | self._bits[place]
        assert masks == self._masks, "the copies by key differ from the copies by node"

    def _place(self, node: str, tier: Tier) -> tuple[int, set[BlockKey]]:
        place = (node, tier)
        if place not in self._bits:
            self._bits[place] = 1 << len(self._places)
            self._places.append(place)
            self._held[place] = set()
            if tier is Tier.L2:
                self._l2_bits |= self._bits[place]
        return self._bits[place], self._held[place]

    def _clear(self, key: BlockKey, bit: int) -> None:
        left = self._masks[key] & ~bit
        if left:
            self._masks[key] = left
        else:
            del self._masks[key]

    def _l2_names(self, mask: int) -> tuple[str, ...]:
        return tuple(sorted(self._places[i][0] for i in _positions(mask & self._l2_bits)))

    @staticmethod
    def _note_ends(ended: int, length: int, lengths: dict[int, int]) -> None:
        for position in _positions(ended):
            lengths[position] = length


def _positions(mask: int) -> Iterable[int]:
    """Indices of the set bits, lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
