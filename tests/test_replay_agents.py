"""Agents against a fake gateway: order, signals, splicing, failures, ends."""

import asyncio

import pytest

from evolving_infra.errors import InputError
from evolving_infra.replay.agent import Replaying
from evolving_infra.replay.client import GatewayClient
from evolving_infra.replay.clock import Clock
from evolving_infra.replay.driver import drive
from evolving_infra.replay.ideal import IdealCache
from evolving_infra.replay.progress import Progress
from evolving_infra.traces.workload import Dependency, TraceRequest, Trigger, Workload
from evolving_infra.types import BranchKind
from tests.test_replay_fake import PAGE, FakeGateway, Meeting


class InstantClock(Clock):
    """Does not wait; remembers for which moments it was asked, relative to its start."""

    def __init__(self) -> None:
        self.asked: list[float] = []

    def now(self) -> float:
        return 100.0

    async def sleep_until(self, moment: float) -> None:
        self.asked.append(round(moment - 100.0, 6))


def request(name: str, branch: str = "main", *after: Dependency | str, **more) -> TraceRequest:
    fields = {"input_tokens": 40, "output_tokens": 5, "block_ids": (1, 2)} | more
    if branch != "main":
        fields = {"kind": BranchKind.SUBAGENT, "parent_branch": "main"} | fields
    waits = tuple(Dependency(request=item) if isinstance(item, str) else item for item in after)
    return TraceRequest(request=name, branch=branch, dependencies=waits, **fields)


def workload(*requests: TraceRequest, name: str = "w") -> Workload:
    return Workload(name=name, block_size=PAGE, requests=requests)


def replay(
    gateway: FakeGateway,
    *workloads: Workload,
    concurrency: int | None = None,
    clock: Clock | None = None,
) -> Replaying:
    async def run() -> Replaying:
        async with gateway.running() as url, GatewayClient(url, timeout_s=60) as client:
            await client.state()
            replaying = Replaying(
                client=client,
                clock=clock or Clock(),
                ideal=IdealCache(PAGE),
                progress=Progress(sum(len(item.requests) for item in workloads)),
                temperature=0.0,
                seed=7,
            )
            await drive(workloads, replaying, run="r", concurrency=concurrency)
            return replaying

    return asyncio.run(run())


def fan_out() -> Workload:
    return workload(
        request("a", output_tokens=8),
        request("s", "sub1", "a", block_ids=(8, 9)),
        request("t", "sub2", "a", block_ids=(8, 7)),
        request("b", "main", "a", "s", "t", input_tokens=64, block_ids=(1, 2, 3, 4)),
    )


def test_subagents_run_together_and_the_parent_waits_for_both():
    gateway = FakeGateway(hold=Meeting("sub1 0", "sub2 0"))
    replaying = replay(gateway, fan_out())
    log = gateway.log
    assert log[:2] == ["start main 0", "done main 0"]
    assert sorted(log[2:4]) == ["start sub1 0", "start sub2 0"]
    joined = log.index("start main 1")
    assert log.index("done sub1 0") < joined
    assert log.index("done sub2 0") < joined
    assert not any(outcome.failed for outcome in replaying.outcomes)
    assert replaying.problems == []


def test_branches_end_subagents_at_once_and_the_root_last():
    gateway = FakeGateway()
    made = fan_out()
    late = request("u", "sub3", "b", block_ids=(5,))
    replay(gateway, workload(*made.requests, late))
    ends = [line for line in gateway.log if line.startswith("end ")]
    assert sorted(ends[:2]) == ["end sub1", "end sub2"]
    assert ends[-1] == "end main"
    assert gateway.log.index("done sub3 0") < gateway.log.index("end main")


def test_a_parent_outlives_the_first_request_of_its_child():
    made = workload(
        request("a"),
        request("s", "sub", "a"),
        request("g", "grandchild", "s", parent_branch="sub"),
        request("h", "grandchild", "g", parent_branch="sub"),
    )
    gateway = FakeGateway()
    replay(gateway, made)
    log = gateway.log
    assert log.index("done grandchild 0") < log.index("end sub")


def test_signals_and_body():
    gateway = FakeGateway()
    made = workload(
        request("a", version=3),
        request("f", "my fork!", "a", kind=BranchKind.FORK),
    )
    replay(gateway, made)
    root, fork = gateway.headers["main 0"], gateway.headers["my-fork- 0"]
    assert root["X-Branch-Id"] == "r.0.w:0-main"
    assert root["X-Context-Version"] == "3"
    assert "X-Branch-Kind" not in root
    assert "X-Parent-Branch-Id" not in root
    assert fork["X-Branch-Id"] == "r.0.w:1-my-fork-"
    assert (fork["X-Branch-Kind"], fork["X-Parent-Branch-Id"]) == ("fork", "r.0.w:0-main")
    body = gateway.requests["main 0"]
    assert len(body.pop("prompt")) == 40
    assert body == {
        "model": "tiny",
        "max_tokens": 5,
        "temperature": 0.0,
        "seed": 7,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "return_timings": True,
    }


def test_answers_are_part_of_the_next_prompt():
    gateway = FakeGateway()
    replay(gateway, fan_out())
    first = gateway.requests["main 0"]["prompt"]
    spliced = first + gateway.answers["main 0"]
    assert gateway.requests["main 1"]["prompt"][: len(spliced)] == spliced


def test_delays_count_from_completion_and_arrivals_from_the_start():
    clock = InstantClock()
    wait = Dependency(request="a", delay=1.5)
    replay(
        FakeGateway(),
        workload(request("a", not_before=2.0), request("b", "main", wait)),
        clock=clock,
    )
    assert clock.asked == [2.0, 1.5]


def test_a_dispatch_lets_a_child_start_while_its_parent_runs():
    gateway = FakeGateway(hold=Meeting("main 0", "sub 0"))
    launch = Dependency(request="a", trigger=Trigger.DISPATCH)
    replaying = replay(gateway, workload(request("a"), request("s", "sub", launch)))
    assert gateway.log[:2] == ["start main 0", "start sub 0"]
    assert not any(outcome.failed for outcome in replaying.outcomes)


@pytest.mark.parametrize(
    ("way", "status", "text"),
    [
        ("refuse", 400, "prompt: expected less, got more"),
        ("error", 200, "the engine died"),
        ("drop", 0, "the answer broke off"),
        ("cut", 200, "the stream ended without usage"),
    ],
)
def test_a_failure_is_recorded_and_its_dependants_run(way, status, text):
    gateway = FakeGateway(fail={"main 0": way})
    replaying = replay(gateway, fan_out())
    failed = [outcome for outcome in replaying.outcomes if outcome.failed]
    assert [outcome.request for outcome in failed] == ["r.0.w/a"]
    assert failed[0].status == status
    assert failed[0].error is not None
    assert text in failed[0].error
    assert len(replaying.outcomes) == replaying.progress.done == 4
    assert (replaying.progress.failed, replaying.progress.running) == (1, 0)
    prompt = gateway.requests["main 1"]["prompt"]
    assert prompt[:40] == gateway.requests["main 0"]["prompt"]
    assert max(prompt) < 256


def test_without_a_gateway_every_request_fails():
    async def run() -> Replaying:
        gateway = FakeGateway()
        async with gateway.running() as url:
            pass
        async with GatewayClient(url, timeout_s=60) as client:
            replaying = Replaying(
                client=client,
                clock=Clock(),
                ideal=IdealCache(PAGE),
                progress=Progress(4),
                temperature=0.0,
                seed=0,
            )
            await drive([fan_out()], replaying, run="r", concurrency=None)
            return replaying

    replaying = asyncio.run(run())
    assert [outcome.status for outcome in replaying.outcomes] == [0, 0, 0, 0]
    assert replaying.problems == []


def test_a_branch_that_never_ran_is_not_ended():
    gateway = FakeGateway(fail={"sub1 0": "refuse"})
    replay(gateway, fan_out())
    assert "end sub1" not in gateway.log
    assert "end sub2" in gateway.log


def test_an_end_that_fails_is_a_problem():
    replaying = replay(FakeGateway(fail={"end sub1": "yes"}), fan_out())
    assert replaying.problems == ["end of r.0.w:1-sub1: 409 already ended"]


def chains(count: int) -> list[Workload]:
    made = [request("a", output_tokens=1), request("b", "main", "a", output_tokens=1)]
    return [workload(*made, name=f"w{index}") for index in range(count)]


def test_concurrency_limits_whole_agents():
    class Counting:
        running = 0
        most = 0

        async def __call__(self, name: str) -> None:
            self.running += 1
            self.most = max(self.most, self.running)
            await asyncio.sleep(0)
            self.running -= 1

    counting = Counting()
    gateway = FakeGateway(hold=counting)
    replaying = replay(gateway, *chains(3), concurrency=1)
    assert counting.most == 1
    assert (
        gateway.log
        == ["start main 0", "done main 0", "start main 1", "done main 1", "end main"] * 3
    )
    assert len(replaying.outcomes) == 6


def test_without_a_limit_all_agents_run_together():
    arrived: list[str] = []
    everyone = asyncio.Event()

    async def hold(name: str) -> None:
        arrived.append(name)
        if len(arrived) == 3:
            everyone.set()
        await asyncio.wait_for(everyone.wait(), 30)

    replaying = replay(FakeGateway(hold=hold), *chains(3))
    assert arrived[:3] == ["main 0"] * 3
    assert len(replaying.outcomes) == 6


def test_a_concurrency_of_nothing_is_refused():
    with pytest.raises(InputError, match="concurrency: expected a positive number, got 0"):
        replay(FakeGateway(), *chains(1), concurrency=0)


def test_the_same_trace_twice_shares_nothing():
    gateway = FakeGateway()
    replaying = replay(gateway, *chains(1), *chains(1))
    assert {outcome.request for outcome in replaying.outcomes} == {
        "r.0.w0/a",
        "r.0.w0/b",
        "r.1.w0/a",
        "r.1.w0/b",
    }
    prompts = {outcome.request: outcome.prompt for outcome in replaying.outcomes}
    assert prompts["r.0.w0/a"][:PAGE] != prompts["r.1.w0/a"][:PAGE]


def by_request(replaying: Replaying) -> dict:
    return {outcome.request.partition("/")[2]: outcome for outcome in replaying.outcomes}


def test_a_perfect_cache_loses_nothing():
    outcomes = by_request(replay(FakeGateway(), fan_out()))
    assert outcomes["b"].ideal_tokens == outcomes["b"].cached_tokens == 32
    assert outcomes["b"].lost_tokens == 0
    assert outcomes["a"].ideal_tokens == 0


def test_without_a_cache_all_reuse_is_lost():
    outcomes = by_request(replay(FakeGateway(cache=None), fan_out()))
    assert outcomes["b"].lost_tokens == outcomes["b"].ideal_tokens == 32


def test_what_decode_produced_counts_as_reusable():
    made = workload(
        request("a", output_tokens=25),
        request("b", "main", "a", input_tokens=80, block_ids=(1, 2, 3, 4, 5)),
    )
    outcomes = by_request(replay(FakeGateway(), made))
    # 40 prompt tokens and 24 of the 25 output tokens have KV: four blocks of 16.
    assert outcomes["b"].ideal_tokens == 64


def test_client_times_are_ordered():
    for outcome in replay(FakeGateway(), fan_out()).outcomes:
        assert 0.0 < outcome.ttft <= outcome.e2e
