"""How many active branches still need each block, by node.

The count of a block at node n is, summed over both phases, the number of active branches whose
chain contains the block and whose home in that phase is n. The rules of design section 7:

    first request of a fork or a sub-agent    set_chain, then move to its prefill home
    continuation, compaction                  set_chain
    branch end                                end
    KV moves within a phase, across phases    move
    node changes its role                     change_role

A chain is a branch's whole context. A fork's contains the blocks it reuses of its parent; a
sub-agent starts from a context of its own, so it counts on its parent's blocks only where both
begin alike (the same system prompt), as any branch that reuses blocks does. The parent's other
blocks are untouched, also when they happen to be evicted later.
Counts are soft: they order eviction, they never pin.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from evolving_infra.control.branches import Branch
from evolving_infra.types import BlockKey, Phase, Role

Totals = dict[str, dict[BlockKey, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """Blocks of ``node`` whose count left 0 or came back to it."""

    node: str
    counted: tuple[BlockKey, ...]
    uncounted: tuple[BlockKey, ...]


class BranchCounts:
    """Counts by node and block; the only writer of ``Branch.chain`` and ``Branch.homes``."""

    def __init__(self) -> None:
        self._totals: Totals = {}
        self._before: dict[str, dict[BlockKey, bool]] = {}

    def count(self, node: str, key: BlockKey) -> int:
        """Active branches that need this block at ``node``, summed over phases. O(1)."""
        return self._totals.get(node, {}).get(key, 0)

    def counted(self, node: str) -> Sequence[BlockKey]:
        """Blocks with a positive count at ``node``."""
        return tuple(self._totals.get(node, ()))

    def num_counted(self, node: str) -> int:
        """Number of blocks with a positive count at ``node``. O(1)."""
        return len(self._totals.get(node, ()))

    def set_chain(self, branch: Branch, chain: tuple[BlockKey, ...]) -> None:
        """New context: -1 on every block it dropped, +1 on every block it added, in each home.

        The common prefix is untouched: reused blocks are not counted twice. O(blocks that differ),
        plus one comparison of the prefix.
        """
        same = common_prefix(branch.chain, chain)
        for node in branch.homes.values():
            self._add(node, branch.chain[same:], -1)
            self._add(node, chain[same:], +1)
        branch.chain = chain

    def move(self, branch: Branch, phase: Phase, node: str) -> None:
        """The branch's KV of ``phase`` is at ``node`` now: +1 there, -1 where it was.

        The home of the other phase keeps its counts. O(chain), or O(1) if nothing moves.
        """
        source = branch.homes.get(phase)
        if source == node:
            return
        if source is not None:
            self._add(source, branch.chain, -1)
        self._add(node, branch.chain, +1)
        branch.homes[phase] = node

    def end(self, branch: Branch) -> None:
        """The branch ended: -1 on all of its blocks. O(chain)."""
        for node in branch.homes.values():
            self._add(node, branch.chain, -1)
        branch.homes.clear()

    def change_role(self, branches: Iterable[Branch], node: str, after: Role) -> list[Branch]:
        """``node`` becomes ``after``; returns the branches that lost their decode home there.

        D→P: its decode counts go to 0, memory frees itself by eviction. P→D: its counts stay, its
        KV stays protected and readable. BOTH follows from what the node still serves.
        O(branches + blocks released).
        """
        if after.serves(Phase.DECODE):
            return []
        moved = [branch for branch in branches if branch.homes.get(Phase.DECODE) == node]
        for branch in moved:
            self._add(node, branch.chain, -1)
            del branch.homes[Phase.DECODE]
        return moved

    def take_transitions(self) -> list[Transition]:
        """Changes from or to 0 since the last call, by node id; those that cancel out are none."""
        transitions = []
        for node, before in sorted(self._before.items()):
            totals = self._totals.get(node, {})
            counted = tuple(key for key, was in before.items() if not was and key in totals)
            uncounted = tuple(key for key, was in before.items() if was and key not in totals)
            if counted or uncounted:
                transitions.append(Transition(node=node, counted=counted, uncounted=uncounted))
        self._before.clear()
        return transitions

    def check(self, branches: Iterable[Branch]) -> None:
        """Assert the counts against ``recount``. O(all chains)."""
        held = {node: totals for node, totals in self._totals.items() if totals}
        assert held == recount(branches), "the counts differ from a recount"

    def _add(self, node: str, keys: Iterable[BlockKey], step: int) -> None:
        totals = self._totals.setdefault(node, {})
        before = self._before.setdefault(node, {})
        for key in keys:
            old = totals.get(key, 0)
            before.setdefault(key, old > 0)
            assert old + step >= 0, "a count never falls below 0"
            if old + step:
                totals[key] = old + step
            else:
                del totals[key]


def recount(branches: Iterable[Branch]) -> Totals:
    """All counts from scratch, by the definition. O(all chains)."""
    totals: Totals = {}
    for branch in branches:
        for node in branch.homes.values():
            counts = totals.setdefault(node, {})
            for key in branch.chain:
                counts[key] = counts.get(key, 0) + 1
    return {node: counts for node, counts in totals.items() if counts}


def common_prefix(old: Sequence[BlockKey], new: Sequence[BlockKey]) -> int:
    """How many leading blocks two chains share."""
    shorter = min(len(old), len(new))
    if old[:shorter] == new[:shorter]:
        return shorter
    return next(i for i in range(shorter) if old[i] != new[i])
