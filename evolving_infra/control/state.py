"""Everything the control plane knows, for the event handlers. Only they change it."""

from evolving_infra.config import ControlConfig
from evolving_infra.control.branches import Branch, BranchTree
from evolving_infra.control.counts import BranchCounts
from evolving_infra.control.directory import Directory
from evolving_infra.control.iteration_time import IterationTimes
from evolving_infra.control.nodes import Node, Request
from evolving_infra.control.prefetch import PrefetchWants
from evolving_infra.control.router import Router
from evolving_infra.errors import wrong
from evolving_infra.types import Phase


class ControlState:
    """The parts, and the few questions that need several of them."""

    def __init__(self, config: ControlConfig) -> None:
        self.config = config
        self.directory = Directory()
        self.branches = BranchTree()
        self.counts = BranchCounts()
        self.times = IterationTimes(config.expert_share)
        self.router = Router(self.directory, self.counts, self.times)
        self.wants = PrefetchWants()
        self.nodes: dict[str, Node] = {}
        self.requests: dict[str, Request] = {}

    def node(self, name: str) -> Node:
        """A node that has joined. ``InputError`` if there is none of this name."""
        node = self.nodes.get(name)
        if node is None:
            raise wrong("node", f"one of {', '.join(sorted(self.nodes)) or 'no nodes yet'}", name)
        return node

    def candidates(self, phase: Phase, *, avoid: str | None = None) -> list[Node]:
        """Nodes that may get a request of ``phase``: up, and of the right role.

        Engines are symmetric: if none serves ``phase`` any node that is up may get it. ``avoid``
        is used only if nothing else is up.
        """
        up = [node for node in self.nodes.values() if node.is_up]
        others = [node for node in up if node.name != avoid] or up
        return [node for node in others if node.role.serves(phase)] or others

    def latest_branch(self, request: Request) -> Branch | None:
        """The request's branch if it is active and had no newer request since."""
        branch = self.branches.find(request.branch)
        if branch is None or branch.latest_request != request.name:
            return None
        return branch

    def check(self) -> None:
        """Assert every total against a recount. O(everything)."""
        in_flight: dict[str, int] = {}
        for request in self.requests.values():
            in_flight[request.branch] = in_flight.get(request.branch, 0) + 1
        active = list(self.branches.active())
        self.branches.check(in_flight)
        self.counts.check(active)
        self.directory.check()
        self.wants.check({branch.name for branch in active if not branch.in_flight})
        placed = {r.name: r.node for r in self.requests.values() if r.node is not None}
        listed = {name: node.name for node in self.nodes.values() for name in node.requests}
        assert placed == listed, "requests and nodes disagree on who runs where"
        for node in self.nodes.values():
            assert node.is_up or not node.requests, f"{node.name} is down and has requests"
