"""Where an idle branch's blocks are brought while its tools run (design section 6: prefetch).

To its prefill home, and to other prefill nodes that hold most of its context already: keeping
those up to date costs a few blocks a turn, and if the home is busy the next request can start
there without waiting for a fetch. Their copies are not counted, so they are evicted first.
"""

from collections.abc import Iterable

from evolving_infra.control.branches import Branch
from evolving_infra.control.commands import Command, Prefetch
from evolving_infra.control.prefetch import missing_at, plan_prefetch
from evolving_infra.control.state import ControlState
from evolving_infra.types import BlockKey, Phase

WARM_SHARE = 0.5
"""A node is kept up to date if it holds at least this share of the branch's blocks."""


def bring_home(state: ControlState, branch: Branch) -> list[Command]:
    """Copy what the branch's nodes lack, if the branch is idle. O(chain · prefill nodes).

    Blocks that no L2 has yet are copied by ``bring_late`` when they get there.
    """
    if not state.config.prefetch or branch.in_flight:
        return []
    commands: list[Command] = []
    for node in _targets(state, branch):
        planned, nowhere = plan_prefetch(
            state.directory,
            branch.name,
            node,
            missing_at(state.directory, node, branch.chain),
            prefer=branch.homes.get(Phase.DECODE),
        )
        state.wants.add(branch.name, nowhere)
        commands += planned
    return commands


def bring_late(state: ControlState, node: str, keys: Iterable[BlockKey]) -> list[Command]:
    """Blocks came into ``node``'s L2: copy them on for the idle branches that wait for them."""
    batches: dict[tuple[str, str], list[BlockKey]] = {}
    targets: dict[str, list[str]] = {}
    for key in keys:
        served: set[str] = set()
        for name in state.wants.take(key):
            branch = state.branches.find(name)
            assert branch is not None, "only active branches want blocks"
            if name not in targets:
                targets[name] = _targets(state, branch)
            for target in targets[name]:
                if target not in served and missing_at(state.directory, target, [key]):
                    served.add(target)
                    batches.setdefault((target, name), []).append(key)
    return [
        Prefetch(node=target, source=node, branch=name, keys=tuple(found))
        for (target, name), found in batches.items()
    ]


def _targets(state: ControlState, branch: Branch) -> list[str]:
    """The branch's prefill home and the warm nodes; none if its next request can't run at home."""
    home = branch.homes.get(Phase.PREFILL)
    names = sorted(node.name for node in state.candidates(Phase.PREFILL))
    if home is None or home not in names:
        return []
    most = (1 - WARM_SHARE) * len(branch.chain)
    warm = [
        name
        for name in names
        if name != home and len(missing_at(state.directory, name, branch.chain)) <= most
    ]
    return [home, *warm]
