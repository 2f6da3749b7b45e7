"""Routing and fetch plans: predicted TTFT term by term, ties by id, coalesced sources."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evolving_infra.control.branches import Branch
from evolving_infra.control.commands import FetchSource
from evolving_infra.control.counts import BranchCounts
from evolving_infra.control.directory import Directory
from evolving_infra.control.fetch_plan import plan_reuse
from evolving_infra.control.iteration_time import IterationTimes
from evolving_infra.control.nodes import Node, Request
from evolving_infra.control.router import RECOMPUTE_SHARE, Router
from evolving_infra.types import BranchKind, Phase, Role, Tier

PAGE = 16
KEYS = tuple(bytes([i]) for i in range(20))


class Cluster:
    """Nodes, a directory and a router over them; 1 ms a token unless told otherwise."""

    def __init__(self, *names: str, token_s: float = 1e-3) -> None:
        self.directory, self.counts = Directory(), BranchCounts()
        self.times = IterationTimes(0.0)
        self.router = Router(self.directory, self.counts, self.times)
        self.nodes = {
            name: Node(name=name, role=Role.BOTH, page_size=PAGE, l1_blocks=100, l2_blocks=100)
            for name in names
        }
        self.serial = 0
        self.measure(token_s)

    def measure(self, token_s: float, decode_s: float = 10e-3) -> None:
        for name in self.nodes:
            for i in range(40):  # fits c1 = token_s and nothing else
                tokens = 10 + 37 * i % 400
                pairs = tokens * (tokens + 1) // 2
                work = (tokens, pairs, 7 * i % 90)
                self.times.observe_prefill(name, token_s * tokens, work, float(i))
            for i in range(40):
                running = 1 + i % 8
                self.times.observe_decode(name, decode_s + 1e-3 * running, running, float(i))

    def put(self, node: str, phase: Phase, tokens: int, *, running=False, since=0.0) -> Request:
        self.serial += 1
        request = Request(
            name=f"r{self.serial}",
            branch="b",
            prompt_keys=(),
            prompt_tokens=tokens,
            max_tokens=1,
            phase=phase,
            node=node,
            running=running,
            since=since,
            service_seconds=1e-3 * tokens,
        )
        self.nodes[node].requests[request.name] = request
        return request

    def choose(self, blocks: int, extra: int = 1, now: float = 100.0):
        request = Request(
            name="new",
            branch="b",
            prompt_keys=KEYS[:blocks],
            prompt_tokens=PAGE * blocks + extra,
            max_tokens=1,
        )
        return self.router.prefill(request, list(self.nodes.values()), now)


def test_ties_go_to_the_smaller_id() -> None:
    for names in (("b", "a", "c"), ("c", "b", "a")):
        assert Cluster(*names).choose(4).node == "a"


def test_own_service_counts_only_uncached_tokens() -> None:
    cluster = Cluster("a", "b")
    cluster.directory.store("b", Tier.L2, KEYS[:3])
    choice = cluster.choose(4)
    assert choice.node == "b"
    assert choice.fetches == ()
    assert choice.ttft_seconds == pytest.approx(1e-3 * (PAGE + 1), rel=1e-3)


def test_a_queue_and_the_running_batch_send_the_request_elsewhere() -> None:
    cluster = Cluster("a", "b")
    cluster.put("a", Phase.PREFILL, 500)
    cluster.put("b", Phase.PREFILL, 800, running=True, since=99.9)
    assert cluster.router.wait_seconds(cluster.nodes["a"], 100.0) == pytest.approx(0.5)
    assert cluster.router.wait_seconds(cluster.nodes["b"], 100.0) == pytest.approx(0.7)
    assert cluster.choose(4).node == "a"
    assert cluster.choose(4, now=100.25).node == "b"  # by then most of it is done
    assert cluster.router.wait_seconds(cluster.nodes["b"], 200.0) == 0.0


def test_a_running_decode_batch_delays_by_one_iteration() -> None:
    cluster = Cluster("a", "b")
    cluster.put("a", Phase.DECODE, 100, running=True)
    assert cluster.router.wait_seconds(cluster.nodes["a"], 0.0) == pytest.approx(11e-3, rel=1e-2)
    assert cluster.choose(4).node == "b"


def test_locality_beats_a_short_queue_and_loses_to_a_long_one() -> None:
    cluster = Cluster("a", "b")
    cluster.directory.store("b", Tier.L1, KEYS[:10])
    cluster.put("b", Phase.PREFILL, 1)
    assert cluster.choose(10).node == "b"
    cluster.put("b", Phase.PREFILL, 5000)
    assert cluster.choose(10).node == "a"


def test_missing_blocks_are_fetched_and_the_wait_hides_the_fetch() -> None:
    cluster = Cluster("a")
    cluster.directory.store("x", Tier.L2, KEYS[:10])
    idle = cluster.choose(10)
    assert idle.fetches == (FetchSource(node="x", first=0, count=10),)
    own = 1e-3 * 1
    assert idle.ttft_seconds == pytest.approx(own + cluster.times.fetch_seconds(10), rel=1e-2)
    assert idle.service_seconds == pytest.approx(own, rel=1e-2)
    cluster.put("a", Phase.PREFILL, 1000)
    assert cluster.choose(10).ttft_seconds == pytest.approx(1.0 + own, rel=1e-2)


def test_a_fetch_is_skipped_where_recomputing_is_clearly_cheaper() -> None:
    cheap = RECOMPUTE_SHARE * IterationTimes(0.0).fetch_seconds(10) / (10 * PAGE)
    for token_s, fetched in ((1.5 * cheap, True), (0.7 * cheap, False)):
        cluster = Cluster("a", token_s=token_s)
        cluster.directory.store("x", Tier.L2, KEYS[:10])
        assert bool(cluster.choose(10, extra=1).fetches) == fetched


def test_the_last_token_is_computed_so_its_block_is_not_fetched() -> None:
    cluster = Cluster("a")
    cluster.directory.store("x", Tier.L2, KEYS[:4])
    assert cluster.choose(4, extra=0).fetches == (FetchSource(node="x", first=0, count=3),)
    assert cluster.choose(4, extra=1).fetches == (FetchSource(node="x", first=0, count=4),)


def test_what_fetches_took_decides_between_fetching_and_recomputing() -> None:
    cluster = Cluster("a")
    cluster.directory.store("x", Tier.L2, KEYS[:10])
    assert cluster.choose(10).fetches
    for i in range(12):
        blocks = 1 + i
        cluster.times.observe_fetch(0.5 + 0.1 * blocks, blocks, 1.5 * i)
    assert cluster.times.fetch_seconds(10) == pytest.approx(1.5, rel=1e-6)
    assert cluster.times.fetch_seconds(0) == 0.0
    assert not cluster.choose(10).fetches, "160 tokens are computed in 0.16 s"


def test_a_copy_that_would_displace_needed_blocks_costs_their_prefill() -> None:
    cluster = Cluster("a", "b")
    cluster.directory.store("x", Tier.L2, KEYS[:10])
    needed = tuple(bytes([200, i]) for i in range(100))
    cluster.directory.store("a", Tier.L2, needed)
    assert cluster.choose(10).node == "a"  # full, but of blocks that nobody needs
    branch = Branch(name="b", parent=None, kind=BranchKind.ROOT, version=0, last_seen=0.0)
    cluster.counts.move(branch, Phase.PREFILL, "a")
    cluster.counts.set_chain(branch, needed)
    assert cluster.choose(10).node == "b"
    del cluster.nodes["b"]
    cost = cluster.choose(10).ttft_seconds - 1e-3 - cluster.times.fetch_seconds(10)
    assert cost == pytest.approx(10 * PAGE * 1e-3, rel=1e-2)


# -- decode ----------------------------------------------------------------------------------


def decode(cluster: Cluster, *, home=None, source=None, tokens=32) -> str:
    request = Request(name="new", branch="b", prompt_keys=(), prompt_tokens=tokens, max_tokens=16)
    nodes = list(cluster.nodes.values())
    return cluster.router.decode(request, nodes, home=home, source=source)


def test_decode_goes_to_the_smallest_predicted_iteration_time() -> None:
    cluster = Cluster("a", "b")
    cluster.put("a", Phase.DECODE, 10)
    cluster.put("a", Phase.DECODE, 10)
    assert decode(cluster) == "b"
    assert decode(cluster, home="a") == "b"


def test_decode_home_wins_near_ties_only_and_then_the_id() -> None:
    cluster = Cluster("a", "b", "c")
    assert decode(cluster) == "a"
    assert decode(cluster, home="c") == "c"
    cluster.measure(1e-3, decode_s=1.0)  # one more request hardly matters now
    for name in ("a", "b", "c"):
        for i in range(400):
            cluster.times.observe_decode(name, 1.0 + 1e-3 * (1 + i % 8), 1 + i % 8, 100.0 + i)
    cluster.put("c", Phase.DECODE, 10)
    assert decode(cluster, home="c") == "c"
    assert decode(cluster, home="c", source="b") == "b", "no hand-off beats a short one"


def test_decode_avoids_nodes_whose_memory_would_overflow() -> None:
    cluster = Cluster("a", "b")
    cluster.put("a", Phase.DECODE, PAGE * 98)
    for _ in range(5):
        cluster.put("b", Phase.DECODE, PAGE)
    assert decode(cluster, tokens=PAGE * 10) == "b"
    assert decode(cluster, tokens=PAGE * 99) == "b", "none fits: the one with most free blocks"


# -- fetch plans -----------------------------------------------------------------------------


def match_of(copies: dict[str, str], l1: dict[str, int] | None = None):
    """A directory where node n's L2 holds the blocks marked in a string such as ``x..x``."""
    directory = Directory()
    for node, marks in copies.items():
        directory.store(node, Tier.L2, [KEYS[i] for i, mark in enumerate(marks) if mark == "x"])
    for node, length in (l1 or {}).items():
        directory.store(node, Tier.L1, KEYS[:length])
    return directory.match(KEYS)


@pytest.mark.parametrize(
    ("copies", "l1", "expected"),
    [
        ({"a": "", "b": "xxxx"}, {}, [("b", 0, 4)]),
        ({"a": "xx", "b": "xxxx"}, {}, [("b", 2, 2)]),
        ({"a": "x.x.", "b": "xxxx"}, {}, [("b", 1, 1), ("b", 3, 1)]),
        ({"a": "", "b": "xx..", "c": ".xxx"}, {}, [("b", 0, 2), ("c", 2, 2)]),
        ({"a": "", "b": "xx..", "c": "xxx."}, {}, [("c", 0, 3)]),
        ({"a": "", "c": "xxxx", "b": "xxxx"}, {}, [("b", 0, 4)]),
        ({"a": "", "b": "xxxx"}, {"a": 3}, [("b", 3, 1)]),
        ({"a": "", "b": "..xx"}, {"a": 2}, [("b", 2, 2)]),
        ({"a": "", "b": "..xx"}, {"c": 2}, []),
        ({"a": "xxxx", "b": "xxxx"}, {}, []),
    ],
)
def test_fetch_plans(copies, l1, expected) -> None:
    reuse = plan_reuse(match_of(copies, l1), "a")
    assert reuse.fetches == tuple(FetchSource(node=n, first=f, count=c) for n, f, c in expected)


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from("abcd"), st.text("x.", max_size=8)),
    st.dictionaries(st.sampled_from("ab"), st.integers(0, 8)),
)
def test_a_plan_covers_exactly_what_is_missing_from_nodes_that_have_it(copies, l1) -> None:
    reuse = plan_reuse(match_of(copies, l1), "a")
    held = {
        name: {i for i, mark in enumerate(marks) if mark == "x"} for name, marks in copies.items()
    }
    device, own = l1.get("a", 0), held.get("a", set())
    pool = device
    while any(pool in blocks for blocks in held.values()):
        pool += 1
    assert (reuse.device_blocks, reuse.pool_blocks) == (device, pool)
    wanted = [i for i in range(device, pool) if i not in own]
    assert reuse.local_blocks == (wanted[0] if wanted else pool)
    assert [i for f in reuse.fetches for i in range(f.first, f.first + f.count)] == wanted
    assert reuse.fetch_blocks == len(wanted)
    for fetch in reuse.fetches:
        assert fetch.node != "a"
        assert set(range(fetch.first, fetch.first + fetch.count)) <= held[fetch.node]
