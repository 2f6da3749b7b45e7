"""Which blocks of a prompt a node could reuse, and whom it would read the missing ones from."""

from dataclasses import dataclass

from evolving_infra.control.commands import FetchSource
from evolving_infra.control.directory import Match


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """Leading blocks of a prompt that need no computing on one node, under three conditions.

    Attributes:
        device_blocks: those in its own L1.
        local_blocks: those in its own L1 or L2.
        pool_blocks: those in its own L1 or in the L2 of any node, once ``fetches`` are done.
        fetches: the missing blocks up to ``pool_blocks``, in order, coalesced.
    """

    device_blocks: int
    local_blocks: int
    pool_blocks: int
    fetches: tuple[FetchSource, ...]

    @property
    def fetch_blocks(self) -> int:
        """Blocks to fetch."""
        return sum(fetch.count for fetch in self.fetches)


def plan_reuse(match: Match, node: str) -> Reuse:
    """What ``node`` could reuse of a matched chain. O(blocks · copies of a block)."""
    device = match.l1.get(node, 0)
    pool = device
    while pool < len(match.holders) and match.holders[pool]:
        pool += 1
    missing = [i for i in range(device, pool) if node not in match.holders[i]]
    return Reuse(
        device_blocks=device,
        local_blocks=missing[0] if missing else pool,
        pool_blocks=pool,
        fetches=_coalesce(match, missing),
    )


def _coalesce(match: Match, missing: list[int]) -> tuple[FetchSource, ...]:
    """Cover the missing blocks by runs: at each step the node that holds the longest one."""
    fetches: list[FetchSource] = []
    start = 0
    while start < len(missing):
        left = set(match.holders[missing[start]])
        best, end = min(left), start
        while end < len(missing) and missing[end] == missing[start] + end - start:
            left.intersection_update(match.holders[missing[end]])
            if not left:
                break
            best, end = min(left), end + 1
        fetches.append(FetchSource(node=best, first=missing[start], count=end - start))
        start = end
    return tuple(fetches)
