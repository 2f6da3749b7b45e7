"""The branches that are alive: who started whom, and what each has in its context now.

``Branch.chain`` and ``Branch.homes`` are written by ``counts.BranchCounts`` only, so that the
counts always agree with them.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from evolving_infra.control.events import RequestArrived
from evolving_infra.errors import InputError, StateError, wrong
from evolving_infra.types import BlockKey, BranchKind, Phase

REMEMBERED_ENDS = 100_000


@dataclass(slots=True, kw_only=True)
class Branch:
    """One context (design section 4). ``last_seen``: when it began or last ended a request."""

    name: str
    parent: str | None
    kind: BranchKind
    version: int
    last_seen: float
    chain: tuple[BlockKey, ...] = ()
    homes: dict[Phase, str] = field(default_factory=dict)
    latest_request: str | None = None
    in_flight: int = 0


class BranchTree:
    """All active branches, the idle ones by age, and the names of ended ones (bounded)."""

    def __init__(self, remembered_ends: int = REMEMBERED_ENDS) -> None:
        self._active: dict[str, Branch] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._remembered_ends = remembered_ends

    def __len__(self) -> int:
        return len(self._active)

    def active(self) -> Iterable[Branch]:
        """Active branches, oldest first."""
        return self._active.values()

    def find(self, name: str) -> Branch | None:
        """The branch if it is active."""
        return self._active.get(name)

    def check_arrival(self, event: RequestArrived) -> None:
        """Raise what is wrong with the branch fields of a request; change nothing.

        Raises:
            StateError: the branch has ended.
            InputError: version goes back; parent and kind contradict each other or what is known.
        """
        if event.branch in self._ended:
            raise StateError(f"branch {event.branch!r} has ended: it takes no more requests")
        branch = self._active.get(event.branch)
        if branch is None:
            self._check_first(event)
            return
        if event.version < branch.version:
            raise wrong("version", f"at least {branch.version}, never going back", event.version)
        if event.kind is not BranchKind.ROOT and event.kind is not branch.kind:
            raise wrong("kind", f"{branch.kind.value}, as the branch started", event.kind.value)
        if event.parent is not None and event.parent != branch.parent:
            raise wrong("parent", f"{branch.parent!r}, as the branch started", event.parent)

    def arrive(self, event: RequestArrived, now: float) -> Branch:
        """Note a checked request; a branch unseen so far starts here, with an empty chain."""
        branch = self._active.get(event.branch)
        if branch is None:
            branch = Branch(
                name=event.branch,
                parent=event.parent,
                kind=event.kind,
                version=event.version,
                last_seen=now,
            )
            self._active[event.branch] = branch
        branch.version = event.version
        branch.latest_request = event.request
        branch.in_flight += 1
        self._idle.pop(event.branch, None)
        return branch

    def leave(self, name: str, now: float) -> Branch | None:
        """One request of the branch is over. None if the branch has ended before."""
        branch = self._active.get(name)
        if branch is None:
            return None
        assert branch.in_flight > 0, "a request ends only once"
        branch.in_flight -= 1
        branch.last_seen = now
        if branch.in_flight == 0:
            self._idle[name] = None
        return branch

    def check_end(self, name: str) -> None:
        """Raise if the branch can't end now.

        Raises:
            StateError: it has ended already.
            InputError: no such branch.
        """
        if name in self._ended:
            raise StateError(f"branch {name!r} has ended already")
        if name not in self._active:
            raise InputError(f"branch: expected a known branch, got {name!r}")

    def end(self, name: str) -> Branch:
        """Take a branch out and remember its name. Its children go on."""
        branch = self._active.pop(name)
        self._idle.pop(name, None)
        self._ended[name] = None
        if len(self._ended) > self._remembered_ends:
            self._ended.popitem(last=False)
        return branch

    def longest_idle(self) -> Branch | None:
        """The idle branch that was seen least recently. O(1)."""
        for name in self._idle:
            return self._active[name]
        return None

    def check(self, in_flight: dict[str, int]) -> None:
        """Assert the totals against the live requests by branch. O(branches)."""
        for name, branch in self._active.items():
            assert branch.in_flight == in_flight.get(name, 0), f"{name} miscounts its requests"
            assert (name in self._idle) == (branch.in_flight == 0), f"{name} is idle or is not"
        ages = [self._active[name].last_seen for name in self._idle]
        assert ages == sorted(ages), "idle branches are in order of age"
        assert not self._active.keys() & self._ended.keys(), "a branch is active or has ended"

    def _check_first(self, event: RequestArrived) -> None:
        if event.version < 0:
            raise wrong("version", "0 or more", event.version)
        if event.kind is BranchKind.ROOT:
            if event.parent is not None:
                raise wrong("parent", "none for a root branch", event.parent)
        elif event.parent is None or not self._knows(event.parent):
            raise wrong("parent", f"a known branch for a {event.kind.value}", event.parent)

    def _knows(self, name: str) -> bool:
        return name in self._active or name in self._ended
