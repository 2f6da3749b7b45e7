"""The branch-count table of design section 7, one test a row, in the words of the table."""

import pytest

from evolving_infra.config import ControlConfig
from evolving_infra.control import commands as do
from evolving_infra.control import events as ev
from evolving_infra.control.plane import ControlPlane
from evolving_infra.types import BranchKind, Phase, Role, Tier

PAGE = 16


class Driver:
    """A plane with nodes; runs whole requests and remembers the counted blocks of every node."""

    def __init__(self, **roles: Role) -> None:
        self.plane = ControlPlane(ControlConfig(branch_lease_s=100.0))
        self.now = 0.0
        self.counted: dict[str, set[bytes]] = {}
        self.requests = 0
        for name, role in roles.items():
            self.do(ev.NodeJoined(node=name, role=role, page_size=PAGE, l1_blocks=99, l2_blocks=99))

    def do(self, event: ev.Event) -> list[do.Command]:
        commands = self.plane.handle(event, self.now)
        self.plane.check()
        for command in commands:
            if isinstance(command, do.SetCounted):
                held = self.counted.setdefault(command.node, set())
                assert not held & set(command.counted), "counted twice"
                assert set(command.uncounted) <= held, "uncounted without being counted"
                held |= set(command.counted)
                held -= set(command.uncounted)
        return commands

    def arrive(
        self,
        branch: str,
        keys: str,
        version: int = 0,
        kind: BranchKind = BranchKind.ROOT,
        parent: str | None = None,
    ) -> str:
        """Start a request whose prompt is one block a letter; returns its id."""
        self.requests += 1
        name = f"r{self.requests}"
        self.do(
            ev.RequestArrived(
                request=name,
                branch=branch,
                version=version,
                kind=kind,
                parent=parent,
                prompt_keys=chain(keys),
                prompt_tokens=PAGE * len(keys) + 1,
                max_tokens=8,
            )
        )
        return name

    def prefilled(self, name: str) -> None:
        request = self.plane.request(name)
        assert request is not None
        assert request.node is not None
        self.do(ev.PrefillDone(request=name, node=request.node, cached_tokens=0, restored_tokens=0))

    def run(self, branch: str, keys: str, output: str = "", **more) -> None:
        """A whole request that appends ``output``."""
        name = self.arrive(branch, keys, **more)
        self.prefilled(name)
        self.do(ev.RequestFinished(request=name, keys=chain(keys + output), output_tokens=1))

    def counts(self, node: str, keys: str) -> list[int]:
        """Counts of single letters; the counted blocks told to the node must agree."""
        counts = [self.plane.count(node, key) for key in letters(keys)]
        told = self.counted.get(node, set())
        assert [count > 0 for count in counts] == [key in told for key in letters(keys)]
        return counts


def letters(keys: str) -> list[bytes]:
    return [key.encode() for key in keys]


def chain(keys: str) -> tuple[bytes, ...]:
    return tuple(letters(keys))


@pytest.fixture
def pd() -> Driver:
    return Driver(p=Role.PREFILL, d=Role.DECODE)


def test_first_request_of_a_fork_counts_the_blocks_it_reuses_and_its_own(pd: Driver) -> None:
    pd.run("main", "abc")
    pd.arrive("fork", "abx", kind=BranchKind.FORK, parent="main")
    assert pd.counts("p", "abcx") == [2, 2, 1, 1]


def test_first_request_of_a_subagent_counts_only_its_own_blocks(pd: Driver) -> None:
    pd.run("main", "abc")
    pd.arrive("sub", "xy", kind=BranchKind.SUBAGENT, parent="main")
    assert pd.counts("p", "abcxy") == [1, 1, 1, 1, 1]
    pd.do(ev.BlocksStored(node="p", tier=Tier.L2, keys=chain("abc")))
    pd.do(ev.BlocksRemoved(node="p", tier=Tier.L2, keys=chain("abc")))
    pd.do(ev.BranchEnded(branch="sub"))
    assert pd.counts("p", "abcxy") == [1, 1, 1, 0, 0]


def test_a_subagent_counts_what_it_shares_with_its_parent_as_any_reuse(pd: Driver) -> None:
    """The same system prompt, say: these blocks are its own context too."""
    pd.run("main", "abc")
    pd.arrive("sub", "abx", kind=BranchKind.SUBAGENT, parent="main")
    assert pd.counts("p", "abcx") == [2, 2, 1, 1]
    pd.do(ev.BranchEnded(branch="main"))
    assert pd.counts("p", "abcx") == [1, 1, 0, 1]
    pd.do(ev.BranchEnded(branch="sub"))
    assert pd.counts("p", "abcx") == [0, 0, 0, 0]


def test_continuation_counts_only_newly_appended_blocks(pd: Driver) -> None:
    pd.run("main", "ab", output="c")
    assert pd.counts("p", "abcd") == [1, 1, 1, 0]
    pd.arrive("main", "abcd")
    assert pd.counts("p", "abcd") == [1, 1, 1, 1]


def test_compaction_drops_and_adds_and_leaves_the_common_prefix(pd: Driver) -> None:
    pd.run("main", "abcd")
    pd.run("fork", "abz", kind=BranchKind.FORK, parent="main")
    pd.arrive("main", "abxy", version=1)
    assert pd.counts("p", "abcdxyz") == [2, 2, 0, 0, 1, 1, 1]


def test_branch_end_takes_one_from_all_of_its_blocks(pd: Driver) -> None:
    pd.run("main", "abc", output="d")
    pd.run("fork", "abx", kind=BranchKind.FORK, parent="main")
    pd.do(ev.BranchEnded(branch="main"))
    for node in ("p", "d"):
        assert pd.counts(node, "abcdx") == [1, 1, 0, 0, 1]


def test_the_end_of_a_parent_does_not_end_its_children(pd: Driver) -> None:
    pd.run("main", "ab")
    pd.run("fork", "abx", kind=BranchKind.FORK, parent="main")
    pd.do(ev.BranchEnded(branch="main"))
    assert pd.plane.branch_count() == 1
    pd.run("fork", "abxy")
    pd.run("late", "abq", kind=BranchKind.FORK, parent="main")
    assert pd.counts("p", "abxyq") == [2, 2, 1, 1, 1]


def test_kv_moves_prefill_to_prefill_counts_move_to_the_target() -> None:
    cluster = Driver(p=Role.PREFILL, q=Role.PREFILL, d=Role.DECODE)
    cluster.run("main", "ab")
    assert cluster.counts("p", "ab") == [1, 1]
    cluster.do(ev.NodeLost(node="p"))
    cluster.arrive("main", "abc")
    assert cluster.counts("p", "abc") == [0, 0, 0]
    assert cluster.counts("q", "abc") == [1, 1, 1]


def test_kv_moves_decode_to_decode_counts_move_to_the_target() -> None:
    cluster = Driver(p=Role.PREFILL, d=Role.DECODE, e=Role.DECODE)
    cluster.run("main", "ab")
    assert cluster.counts("d", "ab") == [1, 1]
    cluster.do(ev.NodeLost(node="d"))
    cluster.run("main", "abc")
    assert cluster.counts("d", "abc") == [0, 0, 0]
    assert cluster.counts("e", "abc") == [1, 1, 1]
    assert cluster.counts("p", "abc") == [1, 1, 1]


def test_kv_moves_prefill_to_decode_both_keep_their_counts(pd: Driver) -> None:
    name = pd.arrive("main", "ab")
    assert pd.counts("d", "ab") == [0, 0]
    pd.prefilled(name)
    assert pd.counts("p", "ab") == [1, 1]
    assert pd.counts("d", "ab") == [1, 1]


def test_kv_moves_decode_to_prefill_both_keep_their_counts(pd: Driver) -> None:
    pd.run("main", "ab", output="c")
    pd.do(ev.BlocksStored(node="p", tier=Tier.L2, keys=chain("abc")))
    pd.arrive("main", "abcd")
    assert pd.counts("d", "abcd") == [1, 1, 1, 1]
    assert pd.counts("p", "abcd") == [1, 1, 1, 1]


def test_node_decode_to_prefill_role_change_takes_its_counts_to_zero(pd: Driver) -> None:
    pd.run("main", "ab", output="c")
    pd.do(ev.RoleAsked(node="d", role=Role.PREFILL))
    assert pd.counts("d", "abc") == [0, 0, 0]
    assert pd.counts("p", "abc") == [1, 1, 1]
    assert pd.plane.homes("main") == {Phase.PREFILL: "p"}


def test_node_prefill_to_decode_role_change_keeps_its_counts() -> None:
    cluster = Driver(p=Role.PREFILL, q=Role.PREFILL, d=Role.DECODE)
    cluster.run("main", "ab")
    cluster.do(ev.RoleAsked(node="p", role=Role.DECODE))
    assert cluster.counts("p", "ab") == [1, 1]
    cluster.arrive("main", "abc")
    assert cluster.counts("p", "abc") == [0, 0, 0]
    assert cluster.counts("q", "abc") == [1, 1, 1]


@pytest.mark.parametrize(
    ("before", "after", "kept"),
    [
        (Role.DECODE, Role.BOTH, True),
        (Role.BOTH, Role.DECODE, True),
        (Role.BOTH, Role.PREFILL, False),
    ],
)
def test_role_both_follows_from_whether_the_node_still_decodes(before, after, kept) -> None:
    cluster = Driver(p=Role.PREFILL, d=before)
    name = cluster.arrive("main", "ab")
    cluster.prefilled(name)
    assert cluster.plane.homes("main") == {
        Phase.PREFILL: "d" if before is Role.BOTH else "p",
        Phase.DECODE: "d",
    }
    cluster.do(ev.RoleAsked(node="d", role=after))
    assert (Phase.DECODE in cluster.plane.homes("main")) == kept


def test_what_still_drains_on_a_former_decode_node_is_not_counted_again(pd: Driver) -> None:
    name = pd.arrive("main", "ab")
    pd.prefilled(name)
    pd.do(ev.RequestStarted(request=name, node="d", phase=Phase.DECODE))
    pd.do(ev.RoleAsked(node="d", role=Role.PREFILL))
    pd.do(ev.RequestFinished(request=name, keys=chain("abc"), output_tokens=1))
    assert pd.counts("d", "abc") == [0, 0, 0]
    assert pd.counts("p", "abc") == [1, 1, 1]


def test_branch_idle_longer_than_its_lease_ends(pd: Driver) -> None:
    pd.now = 5.0
    pd.run("main", "ab")
    assert pd.plane.next_timer() == 105.0
    pd.now = 104.9
    assert pd.do(ev.TimerDue()) == []
    pd.now = 105.0
    commands = pd.do(ev.TimerDue())
    assert do.BranchExpired(branch="main") in commands
    assert pd.counts("p", "ab") == [0, 0]
    assert pd.plane.next_timer() is None


def test_a_branch_with_a_live_request_is_not_idle(pd: Driver) -> None:
    pd.run("main", "ab")
    name = pd.arrive("main", "abc")
    assert pd.plane.next_timer() is None
    pd.now = 1000.0
    assert pd.do(ev.TimerDue()) == []
    pd.do(ev.RequestAborted(request=name))
    assert pd.plane.next_timer() == 1100.0
    assert pd.counts("p", "abc") == [1, 1, 1]


def test_leases_run_out_in_order_of_age(pd: Driver) -> None:
    for now, branch in enumerate(["b", "a", "c"]):
        pd.now = float(now)
        pd.run(branch, branch)
    pd.now = 3.0
    pd.run("b", "bb2")
    pd.now = 102.5
    expired = [c.branch for c in pd.do(ev.TimerDue()) if isinstance(c, do.BranchExpired)]
    assert expired == ["a", "c"]
    assert pd.plane.next_timer() == 103.0


def test_changes_that_cancel_out_are_no_transition(pd: Driver) -> None:
    pd.run("main", "ab")
    assert not any(
        isinstance(command, do.SetCounted)
        for command in pd.do(
            ev.RequestArrived(
                request="again",
                branch="main",
                version=0,
                kind=BranchKind.ROOT,
                parent=None,
                prompt_keys=chain("ab"),
                prompt_tokens=40,
                max_tokens=1,
            )
        )
    )


def test_two_requests_of_a_branch_the_context_is_that_of_the_latest(pd: Driver) -> None:
    first = pd.arrive("main", "ab")
    pd.arrive("main", "ax")
    assert pd.counts("p", "abx") == [1, 0, 1]
    pd.prefilled(first)
    pd.do(ev.RequestFinished(request=first, keys=chain("abc"), output_tokens=1))
    assert pd.counts("p", "abcx") == [1, 0, 0, 1]
    assert pd.counts("d", "abcx") == [0, 0, 0, 0]


def test_a_request_that_outlives_its_branch_finishes_uncounted(pd: Driver) -> None:
    name = pd.arrive("main", "ab")
    pd.do(ev.BranchEnded(branch="main"))
    assert pd.counts("p", "ab") == [0, 0]
    pd.prefilled(name)
    assert pd.do(ev.RequestFinished(request=name, keys=chain("abc"), output_tokens=1)) == []
    assert pd.counts("d", "abc") == [0, 0, 0]
    assert pd.plane.branch_count() == 0
