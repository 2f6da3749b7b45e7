"""The end of branches: told by the harness, or by a lease that ran out."""

from evolving_infra.control.commands import BranchExpired, Command
from evolving_infra.control.events import BranchEnded, TimerDue
from evolving_infra.control.state import ControlState


def ended(state: ControlState, event: BranchEnded, now: float) -> list[Command]:
    """Release the branch's blocks now; a request of it that still runs finishes.

    Raises:
        InputError: no such branch.
        StateError: it has ended already.
    """
    state.branches.check_end(event.branch)
    _end(state, event.branch)
    return []


def timer_due(state: ControlState, event: TimerDue, now: float) -> list[Command]:
    """End every branch that was idle for its whole lease. Early timers change nothing."""
    commands: list[Command] = []
    while (due := next_expiry(state)) is not None and due <= now:
        branch = state.branches.longest_idle()
        assert branch is not None, "an expiry has a branch"
        _end(state, branch.name)
        commands.append(BranchExpired(branch=branch.name))
    return commands


def next_expiry(state: ControlState) -> float | None:
    """When the next lease runs out, None if no branch is idle. O(1)."""
    branch = state.branches.longest_idle()
    return None if branch is None else branch.last_seen + state.config.branch_lease_s


def _end(state: ControlState, name: str) -> None:
    state.wants.drop(name)
    state.counts.end(state.branches.end(name))
