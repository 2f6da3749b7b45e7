"""The report's numbers and keys, the exactness check, role changes, and a whole replay."""

import asyncio
import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from evolving_infra.config import ClusterConfig, EngineConfig
from evolving_infra.errors import InputError, PeerError
from evolving_infra.replay.console import print_report
from evolving_infra.replay.exact import Exactness, check_exact, choose
from evolving_infra.replay.ideal import IdealCache
from evolving_infra.replay.outcome import Outcome
from evolving_infra.replay.progress import Progress
from evolving_infra.replay.report import Measured, ReplayReport, Spread, summarize
from evolving_infra.replay.roles import PlannedRoleChange, parse_role_change
from evolving_infra.replay.run import ReplayOptions, context_tokens, run_replay
from evolving_infra.traces.load import load
from evolving_infra.traces.scale import parse_scale, scale
from evolving_infra.types import RequestTimings, Role, SamplingParams
from tests.test_replay_fake import FakeGateway

EXAMPLE = Path(__file__).parent.parent / "examples" / "trace_0026.jsonl"

ECHO = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    length, count = len(asked["tokens"]), asked["sampling"]["max_tokens"]
    print(json.dumps({"tokens": [(length + step) % 7 + 300 for step in range(count)]}))
"""
"""A cold engine that computes what the fake gateway answers."""


def outcome(name: str = "a", **more) -> Outcome:
    sampling = SamplingParams(max_tokens=2)
    fields = {"prompt": (1,) * 40, "output": (3, 4), "ideal_tokens": 32, "cached_tokens": 32}
    return Outcome(request=name, sampling=sampling, **(fields | more))


def failure(name: str) -> Outcome:
    return outcome(name, output=(), cached_tokens=0, status=502, error="the node died")


def measured(*outcomes: Outcome, before: dict | None = None, after: dict | None = None) -> Measured:
    return Measured(
        outcomes=outcomes,
        before=before or {},
        after=after or {},
        exact=Exactness(checked=2, inexact=()),
        seconds=3.0,
        problems=(),
    )


def report(
    *outcomes: Outcome, before: dict | None = None, after: dict | None = None
) -> ReplayReport:
    return summarize(measured(*outcomes, before=before, after=after), seed=5, command="replay x")


def test_shares_count_tokens_of_finished_requests():
    made = report(outcome(), outcome("b", cached_tokens=16), failure("c"))
    assert (made.requests, made.failed) == (3, 1)
    assert (made.tokens.prompt, made.tokens.cached, made.tokens.recomputed) == (80, 48, 32)
    assert made.tokens.output == 4
    assert made.kv_hit == 48 / 80
    assert made.ideal_kv_hit == 64 / 80
    assert made.lost_reuse == 16 / 64
    assert made.failures == ("c: 502 the node died",)
    assert not made.ok


def test_more_cached_than_ideal_does_not_make_up_for_losses():
    made = report(outcome(cached_tokens=39), outcome("b", cached_tokens=0))
    assert made.lost_reuse == 32 / 71
    assert made.ideal_kv_hit == 71 / 80


def test_percentiles_are_linear():
    assert Spread.of([1.0, 2.0, 3.0, 4.0]) == Spread(mean=2.5, p50=2.5, p95=pytest.approx(3.85))
    assert Spread.of([]) == Spread(mean=0.0, p50=0.0, p95=0.0)


def test_fetches_and_prefetches_share_the_hidden_time():
    fetched = RequestTimings(fetch=0.3, exposed=0.1, queue=0.2)
    prefetch = {"before": {"prefetch": {"seconds": 1.0}}, "after": {"prefetch": {"seconds": 1.2}}}
    made = report(outcome(timings=fetched), outcome("b"), **prefetch)
    assert (made.fetch.count, made.fetch.mean, made.fetch.exposed_mean) == (1, 0.3, 0.1)
    assert made.fetch.hidden_share == pytest.approx(1 - 0.1 / 0.5)
    assert made.queue.mean == pytest.approx(0.1)
    assert made.fetch.waiting_hidden_share == pytest.approx(1 - 0.1 / 0.3)
    only_ahead = report(outcome(), **prefetch).fetch
    assert (only_ahead.hidden_share, only_ahead.waiting_hidden_share) == (1.0, None)
    assert report(outcome()).fetch.hidden_share is None
    assert "80.00 % of all KV read from peers; 66.67 % of what waiting requests read" in shown(made)


def test_tokens_computed_a_second_time_are_told():
    nodes = [{"name": name, "role": "both", "prefill_tokens": 50} for name in "pq"]
    grown = [{**node, "prefill_tokens": 60} for node in nodes]
    made = report(outcome(), before={"nodes": nodes}, after={"nodes": grown})
    assert (made.tokens.recomputed, made.tokens.recomputed_again) == (8, 12)
    assert "8 recomputed, 12 computed again; 2 output" in shown(made)
    once = report(outcome(), before={"nodes": nodes}, after={"nodes": nodes})
    assert once.tokens.recomputed_again == 0
    assert "again" not in shown(once)


@pytest.mark.parametrize("cached", [-1, 41])
def test_impossible_cached_tokens_are_a_problem(cached):
    made = report(outcome(cached_tokens=cached))
    assert made.problems == (f"a: expected 0 to 40 cached tokens, got {cached}",)
    assert not made.ok
    assert report(outcome(cached_tokens=0), outcome(cached_tokens=40)).problems == ()


@given(st.integers(0, 9) | st.none(), st.integers(0, 9) | st.none())
def test_counters_never_shrink(old, new):
    """A process that restarted, or that does not answer, counts from 0."""
    before, after = {"name": "n", "evicted_blocks": old}, {"name": "n", "evicted_blocks": new}
    made = report(
        before={"nodes": [before], "prefetch": {"count": old, "seconds": old}},
        after={"nodes": [{**after, "role": "both"}], "prefetch": {"count": new, "seconds": new}},
    )
    for growth in (
        made.nodes[0]["evicted_blocks"],
        made.fetch.prefetch_count,
        made.fetch.prefetch_seconds,
    ):
        assert growth in {(new or 0) - (old or 0), new or 0}
        assert growth >= 0


def test_cluster_counters_count_from_before_the_replay():
    node = {"name": "n", "role": "decode", "prefill_tokens": 10, "decode_tokens": 7, "pid": 3}
    old = {"node": "n", "from": "prefill", "to": "decode"}
    change = {**old, "control_s": 0.1, "drain_s": 0.2, "blocks_lost": 0, "failed_requests": 0}
    after_node = {**node, "role": "prefill", "prefill_tokens": 25, "decode_tokens": 4}
    made = report(
        outcome(),
        before={"nodes": [node], "role_changes": [old]},
        after={"nodes": [after_node], "role_changes": [old, {**change, "moved_requests": 1}]},
    )
    counts = {"prefill_tokens": 15, "decode_tokens": 4, "fetched_blocks": 0, "evicted_blocks": 0}
    assert made.nodes == ({"name": "n", "role": "prefill", **counts},)
    assert made.role_changes == (change,)


def test_the_stable_keys():
    node = {"name": "n", "role": "decode"}
    made = report(outcome(), after={"nodes": [node], "role_changes": [{"node": "n"}]}).to_json()
    json.dumps(made)
    assert list(made) == [
        *("requests", "failed", "tokens", "kv_hit", "ideal_kv_hit", "lost_reuse"),
        *("ttft", "e2e", "queue", "fetch", "exact", "role_changes", "nodes", "seed", "command"),
    ]
    assert list(made["tokens"]) == [
        *("prompt", "cached", "recomputed", "recomputed_again", "output")
    ]
    for name in ("ttft", "e2e", "queue"):
        assert list(made[name]) == ["mean", "p50", "p95"]
    assert list(made["fetch"]) == [
        *("count", "mean", "p95", "hidden_share", "waiting_hidden_share", "exposed_mean"),
        *("prefetch_count", "prefetch_seconds"),
    ]
    assert made["exact"] == {"checked": 2, "inexact": 0}
    assert list(made["role_changes"][0]) == [
        *("node", "from", "to", "control_s", "drain_s", "blocks_lost", "failed_requests")
    ]
    assert list(made["nodes"][0]) == [
        *("name", "role", "prefill_tokens", "decode_tokens", "fetched_blocks", "evicted_blocks")
    ]


def test_a_report_is_ok_only_without_any_problem():
    good = report(outcome())
    assert good.ok
    assert not replace(good, exact=Exactness(checked=2, inexact=("a",))).ok
    assert not replace(good, problems=("role change x failed",)).ok


def shown(made: ReplayReport) -> str:
    text = io.StringIO()
    print_report(made, Console(file=text, width=120))
    return text.getvalue()


def test_the_report_for_people():
    change = {"node": "node1", "from": "prefill", "to": "decode", "control_s": 0.002}
    change |= {"drain_s": None, "blocks_lost": 0, "failed_requests": 0}
    made = report(outcome(), *(failure(f"f{index}") for index in range(12)))
    text = shown(replace(made, role_changes=(change,), problems=("[odd] problem",)))
    for part in ("lost 0.00 %", "role change", "draining", "failed requests: 12"):
        assert part in text
    assert "f0: 502 the node died" in text
    assert "and 2 more" in text
    assert "[odd] problem" in text
    assert "NOT OK" in text
    assert "NOT OK" not in shown(report(outcome()))


def naive_reusable(produced: list[list[int]], tokens: list[int], page: int) -> int:
    best = 0
    for known in produced:
        usable = len(known) // page * page
        same = 0
        while same < min(usable, len(tokens) - 1) and known[same] == tokens[same]:
            same += 1
        best = max(best, same // page * page)
    return best


short_tokens = st.lists(st.integers(0, 1), min_size=1, max_size=20)


@given(st.lists(short_tokens, max_size=6), short_tokens, st.integers(1, 4))
def test_the_ideal_is_the_longest_known_prefix(produced, tokens, page):
    ideal = IdealCache(page)
    for known in produced:
        ideal.produced(known)
    assert ideal.reusable(tokens) == naive_reusable(produced, tokens, page)


def test_samples_prefer_requests_that_reused_kv():
    cold = [outcome(f"cold{index}", cached_tokens=0) for index in range(20)]
    warm = [outcome(f"warm{index}") for index in range(3)]
    chosen = choose([*cold, failure("f"), *warm], 5, seed=1)
    assert {item.request for item in chosen[:3]} == {"warm0", "warm1", "warm2"}
    assert len(chosen) == 5
    assert chosen == choose([*reversed(cold), *warm], 5, seed=1)
    assert chosen[3:] != choose([*cold, *warm], 5, seed=2)[3:]


def cold(folder: Path, source: str) -> list[str]:
    path = folder / "cold.py"
    path.write_text(source)
    return [sys.executable, str(path)]


def test_identical_tokens_are_exact_and_others_are_named(tmp_path):
    right = outcome("right", output=(305, 306))
    wrong = outcome("wrong", output=(305, 300))
    command = cold(tmp_path, ECHO)
    assert asyncio.run(check_exact([right, wrong], command)) == Exactness(
        checked=2, inexact=("wrong",)
    )
    assert asyncio.run(check_exact([], command)) == Exactness(checked=0, inexact=())


def test_a_check_that_dies_says_why(tmp_path):
    command = cold(tmp_path, "import sys; sys.exit('no memory')")
    with pytest.raises(PeerError, match=r"code 1 after 0 of 1 requests: no memory"):
        asyncio.run(check_exact([outcome()], command))


def test_role_changes_are_parsed():
    change = parse_role_change("node1:decode@5s")
    assert change == PlannedRoleChange(node="node1", role=Role.DECODE, at=5.0)
    assert parse_role_change("n:both@0.25s").at == 0.25
    assert str(change) == "node1:decode@5s"


@pytest.mark.parametrize(
    "text", ["", "node1", "node1:decode", "node1:decode@5", "n:none@5s", ":both@1s"]
)
def test_other_role_changes_are_refused(text):
    with pytest.raises(InputError, match="role change: expected NODE:prefill"):
        parse_role_change(text)


def test_the_progress_line():
    progress = Progress(9)
    progress.sent()
    progress.sent()
    progress.finished(failure("a"))
    progress.saw(
        {"nodes": [{"name": "n0", "role": "both"}, {"name": "n1", "role": "x", "up": False}]}
    )
    line = progress.line(2.5)
    assert "1/9 requests, 1 running, 1 failed" in line
    assert line.endswith("n0:both n1:down")


def options(*changes: str, **more) -> ReplayOptions:
    small = scale(load(EXAMPLE), parse_scale("1/64"), parse_scale("1/10000"))
    planned = tuple(map(parse_role_change, changes))
    fields = {"workloads": (small,), "cluster": ClusterConfig(), "run": "r"} | more
    return ReplayOptions(role_changes=planned, **fields)


def run(gateway: FakeGateway, chosen: ReplayOptions) -> ReplayReport:
    async def whole() -> ReplayReport:
        async with gateway.running() as url:
            return await run_replay(chosen, url, Console(file=io.StringIO()))

    return asyncio.run(whole())


def test_a_whole_replay(tmp_path):
    gateway = FakeGateway(timings={"queue": 0.5, "fetch": 0.2, "exposed": 0.0})
    chosen = options(check_exact=2, seed=9, cold=tuple(cold(tmp_path, ECHO)))
    made = run(gateway, chosen)
    assert made.ok
    assert (made.requests, made.failed, made.seed) == (3, 0, 9)
    assert made.exact == Exactness(checked=2, inexact=())
    assert made.lost_reuse == 0.0
    assert made.kv_hit == made.ideal_kv_hit > 0.5
    assert (made.queue.p50, made.fetch.hidden_share) == (0.5, 1.0)
    assert made.nodes[0]["decode_tokens"] == made.tokens.output


class AwaitingRoles(FakeGateway):
    """Answers the last request only after a role change was asked for, so that one comes first."""

    def __init__(self) -> None:
        super().__init__(hold=self.until_asked)
        self.asked = asyncio.Event()

    async def role(self, request: web.Request) -> web.Response:
        self.asked.set()
        return await super().role(request)

    async def until_asked(self, name: str) -> None:
        if name == "main 2":
            await asyncio.wait_for(self.asked.wait(), 30)


def test_role_changes_in_a_replay():
    made = run(AwaitingRoles(), options("node1:decode@0s", "node1:both@9999s"))
    assert [change["to"] for change in made.role_changes] == ["decode"]
    assert made.problems == ("role change node1:both@9999s: the replay ended before",)


def test_a_role_change_that_fails_is_a_problem():
    made = run(AwaitingRoles(), options("node7:decode@0s"))
    assert made.problems == ("role change node7:decode@0s: 404 no such node",)


def test_an_exactness_check_that_cannot_run_is_a_problem(tmp_path):
    broken = tuple(cold(tmp_path, "raise SystemExit('broken')"))
    made = run(FakeGateway(), options(check_exact=1, cold=broken))
    assert not made.ok
    assert "broken" in made.problems[0]


def test_a_trace_that_does_not_fit_is_refused():
    needed = context_tokens(options().workloads)
    fitting, short = (
        ClusterConfig(engine=EngineConfig(max_context_tokens=limit))
        for limit in (needed, needed - 1)
    )
    options(cluster=fitting)
    with pytest.raises(InputError, match=f"of at most {needed - 1} tokens, got 'one of {needed}'"):
        options(cluster=short)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"workloads": ()}, "workloads: expected at least one trace"),
        ({"concurrency": 0}, "concurrency"),
        ({"check_exact": -1}, "check_exact"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"seed": -1}, "seed"),
    ],
)
def test_options_are_checked(change, text):
    with pytest.raises(InputError, match=text):
        options(**change)
