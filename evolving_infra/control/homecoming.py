"""When an idle branch's blocks are brought to its prefill home (design section 6: prefetch)."""

from collections.abc import Iterable

from evolving_infra.control.branches import Branch
from evolving_infra.control.commands import Command, Prefetch
from evolving_infra.control.prefetch import missing_at, plan_prefetch
from evolving_infra.control.state import ControlState
from evolving_infra.types import BlockKey, Phase


def bring_home(state: ControlState, branch: Branch) -> list[Command]:
    """Copy what the branch's prefill home lacks, if the branch is idle. O(chain).

    Blocks that no L2 has yet are copied by ``bring_late`` when they get there.
    """
    home = _home(state, branch)
    if not state.config.prefetch or branch.in_flight or home is None:
        return []
    missing = missing_at(state.directory, home, branch.chain)
    commands, nowhere = plan_prefetch(
        state.directory, branch.name, home, missing, prefer=branch.homes.get(Phase.DECODE)
    )
    state.wants.add(branch.name, nowhere)
    return list(commands)


def bring_late(state: ControlState, node: str, keys: Iterable[BlockKey]) -> list[Command]:
    """Blocks came into ``node``'s L2: copy them home for the idle branches that wait for them."""
    batches: dict[tuple[str, str], list[BlockKey]] = {}
    for key in keys:
        served: set[str] = set()
        for name in state.wants.take(key):
            branch = state.branches.find(name)
            assert branch is not None, "only active branches want blocks"
            home = _home(state, branch)
            if home is None or home in served or not missing_at(state.directory, home, [key]):
                continue
            served.add(home)
            batches.setdefault((home, name), []).append(key)
    return [
        Prefetch(node=home, source=node, branch=name, keys=tuple(found))
        for (home, name), found in batches.items()
    ]


def _home(state: ControlState, branch: Branch) -> str | None:
    """The branch's prefill home if its next request may run there."""
    home = branch.homes.get(Phase.PREFILL)
    names = {node.name for node in state.candidates(Phase.PREFILL)}
    return home if home in names else None
