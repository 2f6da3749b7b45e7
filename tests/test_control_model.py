"""A stateful test: the plane's counts against a naive recount of sets after every event."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from evolving_infra.config import ControlConfig
from evolving_infra.control import commands as do
from evolving_infra.control import events as ev
from evolving_infra.control.plane import ControlPlane
from evolving_infra.types import BranchKind, Phase, Role, Tier

PAGE = 16
LEASE_S = 50.0
NODES = {"d0": Role.DECODE, "d1": Role.DECODE, "p0": Role.PREFILL, "p1": Role.PREFILL}
INDEX = st.integers(0, 10_000)


def chain(path: tuple[int, ...]) -> tuple[bytes, ...]:
    """Keys of a context; equal prefixes have equal keys, as with digests."""
    return tuple(bytes(path[: i + 1]) for i in range(len(path)))


class CountedBranches(RuleBasedStateMachine):
    """Paths are lists of small numbers, one a block. The model keeps only what was said."""

    def __init__(self) -> None:
        super().__init__()
        self.plane = ControlPlane(ControlConfig(branch_lease_s=LEASE_S))
        self.now, self.serial = 0.0, 0
        self.roles: dict[str, Role] = {}
        self.up: set[str] = set()
        self.branches: dict[str, dict] = {}
        self.requests: dict[str, dict] = {}
        self.told: dict[str, set[bytes]] = {}
        for node, role in NODES.items():
            self.roles[node] = role
            self.join(node)

    # -- what the model learns from events and commands ---------------------------------------

    def do(self, event: ev.Event) -> list[do.Command]:
        commands = self.plane.handle(event, self.now)
        for command in commands:
            if isinstance(command, do.SetCounted):
                told = self.told.setdefault(command.node, set())
                told |= set(command.counted)
                told -= set(command.uncounted)
            elif isinstance(command, do.StartPrefill):
                self.place(command.request, Phase.PREFILL, command.node)
            elif isinstance(command, do.StartDecode):
                assert command.source is not None
                assert command.source in self.up
                self.place(command.request, Phase.DECODE, command.node)
            elif isinstance(command, do.BranchExpired):
                branch = self.branches.pop(command.branch)
                assert branch["seen"] + LEASE_S <= self.now
                assert not self.of_branch(command.branch)
        return commands

    def place(self, name: str, phase: Phase, node: str) -> None:
        assert node in self.up
        self.requests[name] |= {"phase": phase, "node": node, "running": False}
        self.settle(name)

    def settle(self, name: str) -> None:
        request = self.requests[name]
        branch = self.branches.get(request["branch"])
        if branch is None or branch["latest"] != name or request["node"] is None:
            return
        if request["phase"] is Phase.PREFILL or self.roles[request["node"]].serves(Phase.DECODE):
            branch["homes"][request["phase"]] = request["node"]

    def of_branch(self, branch: str) -> list[str]:
        return [name for name, request in self.requests.items() if request["branch"] == branch]

    def join(self, node: str) -> None:
        self.up.add(node)
        self.do(
            ev.NodeJoined(
                node=node, role=self.roles[node], page_size=PAGE, l1_blocks=64, l2_blocks=64
            )
        )

    def pick(self, names, index: int) -> str:
        return sorted(names)[index % len(names)]

    def arrive(self, branch: str, path, version: int, kind=BranchKind.ROOT, parent=None) -> None:
        self.serial += 1
        name = f"r{self.serial}"
        known = self.branches.setdefault(branch, {"homes": {}})
        known |= {"chain": path, "latest": name, "version": version, "seen": self.now}
        self.requests[name] = {"branch": branch, "path": path, "node": None, "running": False}
        self.do(
            ev.RequestArrived(
                request=name,
                branch=branch,
                version=version,
                kind=kind,
                parent=parent,
                prompt_keys=chain(path),
                prompt_tokens=PAGE * len(path) + 3,
                max_tokens=20,
            )
        )

    # -- branches -----------------------------------------------------------------------------

    @precondition(lambda self: self.up)
    @rule(path=st.lists(st.integers(0, 2), max_size=4))
    def start_root(self, path) -> None:
        self.arrive(f"b{self.serial}", tuple(path), 0)

    @precondition(lambda self: self.up and self.branches)
    @rule(index=INDEX, keep=st.integers(0, 4), grow=st.lists(st.integers(0, 2), max_size=3))
    def start_fork(self, index, keep, grow) -> None:
        parent = self.pick(self.branches, index)
        path = (*self.branches[parent]["chain"][:keep], *grow)
        self.arrive(f"b{self.serial}", path, 0, BranchKind.FORK, parent)

    @precondition(lambda self: self.up and self.branches)
    @rule(index=INDEX, shared=st.integers(0, 2), path=st.lists(st.integers(3, 5), max_size=3))
    def start_subagent(self, index, shared, path) -> None:
        """``shared`` blocks begin as the parent's: the same system prompt."""
        parent = self.pick(self.branches, index)
        path = (*self.branches[parent]["chain"][:shared], *path)
        self.arrive(f"b{self.serial}", path, 0, BranchKind.SUBAGENT, parent)

    @precondition(lambda self: self.up and self.branches)
    @rule(index=INDEX, grow=st.lists(st.integers(0, 2), max_size=3))
    def continue_branch(self, index, grow) -> None:
        name = self.pick(self.branches, index)
        branch = self.branches[name]
        self.arrive(name, (*branch["chain"], *grow)[:12], branch["version"])

    @precondition(lambda self: self.up and self.branches)
    @rule(index=INDEX, keep=st.integers(0, 3), grow=st.lists(st.integers(6, 8), max_size=3))
    def compact(self, index, keep, grow) -> None:
        name = self.pick(self.branches, index)
        branch = self.branches[name]
        self.arrive(name, (*branch["chain"][:keep], *grow), branch["version"] + 1)

    @precondition(lambda self: self.branches)
    @rule(index=INDEX)
    def end_branch(self, index) -> None:
        name = self.pick(self.branches, index)
        del self.branches[name]
        self.do(ev.BranchEnded(branch=name))

    @rule(passed=st.sampled_from([1.0, 20.0, 49.0, 60.0]))
    def time_passes(self, passed) -> None:
        self.now += passed
        self.do(ev.TimerDue())
        due = self.plane.next_timer()
        assert due is None or due > self.now
        for name, branch in self.branches.items():
            assert self.of_branch(name) or branch["seen"] + LEASE_S > self.now

    # -- requests -----------------------------------------------------------------------------

    def placed(self, index: int, **wanted) -> str | None:
        names = [
            name
            for name, request in self.requests.items()
            if request["node"] is not None and wanted.items() <= request.items()
        ]
        return self.pick(names, index) if names else None

    @rule(index=INDEX)
    def start(self, index) -> None:
        name = self.placed(index, running=False)
        if name is not None:
            request = self.requests[name]
            self.do(ev.RequestStarted(request=name, node=request["node"], phase=request["phase"]))
            request["running"] = True

    @rule(index=INDEX)
    def prefill_done(self, index) -> None:
        name = self.placed(index, phase=Phase.PREFILL)
        if name is not None:
            node = self.requests[name]["node"]
            self.do(ev.PrefillDone(request=name, node=node, cached_tokens=0, restored_tokens=0))

    @rule(index=INDEX)
    def bounce(self, index) -> None:
        name = self.placed(index, running=False)
        if name is not None and not self.requests[name].get("bounced"):
            request = self.requests[name]
            node, request["bounced"] = request["node"], True
            self.do(ev.RequestBounced(request=name, node=node, phase=request["phase"]))
            assert request["node"] != node or len(self.up) == 1

    @precondition(lambda self: self.requests)
    @rule(index=INDEX, output=st.lists(st.integers(0, 2), max_size=2))
    def finish(self, index, output) -> None:
        name = self.pick(self.requests, index)
        request = self.requests[name]
        path = (*request["path"], *output)[:12]
        branch = self.branches.get(request["branch"])
        if branch is not None and branch["latest"] == name:
            branch["chain"] = path
            if request.get("phase") is Phase.DECODE:
                self.settle(name)
        self.leave(name)
        self.do(ev.RequestFinished(request=name, keys=chain(path), output_tokens=len(output)))

    @precondition(lambda self: self.requests)
    @rule(index=INDEX)
    def abort(self, index) -> None:
        name = self.pick(self.requests, index)
        self.leave(name)
        self.do(ev.RequestAborted(request=name))

    def leave(self, name: str) -> None:
        request = self.requests.pop(name)
        if request["branch"] in self.branches:
            self.branches[request["branch"]]["seen"] = self.now

    # -- nodes --------------------------------------------------------------------------------

    @rule(node=st.sampled_from(list(NODES)), role=st.sampled_from(list(Role)))
    def change_role(self, node, role) -> None:
        if role is self.roles[node]:
            assert self.do(ev.RoleAsked(node=node, role=role)) == []
            return
        self.roles[node] = role
        for branch in self.branches.values():
            if not role.serves(Phase.DECODE) and branch["homes"].get(Phase.DECODE) == node:
                del branch["homes"][Phase.DECODE]
        self.do(ev.RoleAsked(node=node, role=role))

    @rule(node=st.sampled_from(list(NODES)))
    def lose_or_join(self, node) -> None:
        if node not in self.up:
            self.join(node)
            return
        self.up.discard(node)
        for request in self.requests.values():
            if request["node"] == node:
                request |= {"node": None, "phase": None, "running": False}
        self.do(ev.NodeLost(node=node))

    @rule(
        node=st.sampled_from(list(NODES)),
        path=st.lists(st.integers(0, 2), max_size=5),
        stored=st.booleans(),
    )
    def blocks_change(self, node, path, stored) -> None:
        kind = ev.BlocksStored if stored else ev.BlocksRemoved
        self.do(kind(node=node, tier=Tier.L2, keys=chain(tuple(path))))

    # -- what must hold -----------------------------------------------------------------------

    @invariant()
    def counts_equal_a_recount_of_sets(self) -> None:
        self.plane.check()
        assert self.plane.branch_count() == len(self.branches)
        keys = {key for branch in self.branches.values() for key in chain(branch["chain"])}
        for node in NODES:
            counts = {key: self.count(node, key) for key in keys}
            assert all(self.plane.count(node, key) == counts[key] for key in keys)
            positive = {key for key, count in counts.items() if count}
            assert set(self.plane.counted_at(node)) == positive
            assert self.told.get(node, set()) == positive, "transitions add up to the counts"

    @invariant()
    def requests_are_where_the_commands_put_them(self) -> None:
        for name, request in self.requests.items():
            view = self.plane.request(name)
            assert view is not None
            assert view.node == request["node"]
            assert view.running == request["running"]
            assert (view.node is None) == (not self.up)

    def count(self, node: str, key: bytes) -> int:
        return sum(
            key in set(chain(branch["chain"])) and home == node
            for branch in self.branches.values()
            for home in branch["homes"].values()
        )


CountedBranches.TestCase.settings = settings(
    max_examples=120, stateful_step_count=50, deadline=None
)
TestCountedBranches = CountedBranches.TestCase
