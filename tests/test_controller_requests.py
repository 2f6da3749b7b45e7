"""The controller between recorded connections: placements, failover, role changes, accounting."""

import asyncio
from typing import Any

from evolving_infra.cluster.client import Submission
from evolving_infra.cluster.connections import ClientConnection, EngineConnection, StoreConnection
from evolving_infra.cluster.controller import Controller
from evolving_infra.cluster.ledger import Entry
from evolving_infra.cluster.messages import join_keys, split_keys
from evolving_infra.config import ClusterConfig
from evolving_infra.errors import PeerError
from evolving_infra.types import BranchKind, Phase, Role, SamplingParams

PROMPT = tuple(range(40))


class Wire:
    """A connection that records what it is told and answers calls as it was told to."""

    def __init__(self, name: str) -> None:
        self.peer = {"name": name, "pid": 1}
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.answers: dict[str, Any] = {}

    def tell(self, op: str, **fields: Any) -> None:
        self.told.append((op, fields))

    async def call(self, op: str, *, timeout: float | None = None, **fields: Any) -> Any:
        await asyncio.sleep(0)
        answer = self.answers[op]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def of(self, op: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.told if name == op]


class Rig:
    """A controller with an engine and a store per node, and one client."""

    def __init__(self, split: str) -> None:
        self.now = 0.0
        self.controller = Controller(
            ClusterConfig(split=split), lambda node: f"unix:/{node}", lambda: self.now
        )
        self.client = Wire("gateway")
        self.engines: dict[str, Wire] = {}
        self.stores: dict[str, Wire] = {}
        self._connections: dict[str, EngineConnection] = {}
        for node in self.controller.config.roles:
            self.stores[node] = Wire(node)
            self.stores[node].answers["missing"] = {"missing": 0}
            StoreConnection(self.controller, self.stores[node]).opened()  # type: ignore[arg-type]
            self.connect(node)

    def connect(self, node: str) -> None:
        self.engines[node] = Wire(node)
        connection = EngineConnection(self.controller, self.engines[node])  # type: ignore[arg-type]
        self._connections[node] = connection
        connection.opened()

    def lose(self, node: str) -> None:
        self._connections[node].closed()

    def submit(self, request: str = "r", max_tokens: int = 8) -> Entry:
        submission = Submission(
            request=request,
            branch=request,
            version=0,
            kind=BranchKind.ROOT,
            parent=None,
            anonymous=False,
            tokens=PROMPT,
            sampling=SamplingParams(max_tokens=max_tokens),
        )
        entry = Entry(
            submission=submission,
            client=self.client,  # type: ignore[arg-type]
            prompt_keys=self.controller.prompt_keys(PROMPT),
            arrived=self.now,
        )
        self.controller.submit(entry)
        return entry

    async def say(self, entry: Entry, op: str, *, node: str = "", attempt: int = 0, **fields: Any):
        """The engine that has the request (or ``node``) says something about it."""
        node = node or str(entry.node)
        who = {"request": entry.request, "attempt": attempt or entry.attempt}
        await self._connections[node].handle(self.engines[node], op, {**who, **fields})  # type: ignore[arg-type]

    async def started(self, entry: Entry, **timings: float) -> None:
        plain = {"queue": 0.0, "fetch": 0.0, "exposed": 0.0, "cached_tokens": 0}
        decode = entry.phase is Phase.DECODE
        given = {"handoff": 0.0} if decode else {**plain, "fetched_blocks": 0, **timings}
        await self.say(entry, "started", timings=given)

    async def token(self, entry: Entry, token: int, finish: str | None = None, **who: Any) -> None:
        fields = {"tokens": [token], "finish": finish, "since_admitted": 0.1}
        await self.say(entry, "tokens", **fields, **who)

    async def prefilled(self, entry: Entry) -> None:
        """Prefill, first token, and on to decode."""
        await self.started(entry)
        await self.token(entry, 7)
        await self.say(entry, "prefill_done", cached_tokens=0, restored_tokens=0)


def test_a_request_runs_and_its_client_hears_every_token_once() -> None:
    async def main() -> None:
        rig = Rig("1P1D")
        entry = rig.submit()
        await rig.prefilled(entry)
        assert (entry.node, entry.phase) == ("node1", Phase.DECODE)
        (order,) = rig.engines["node1"].of("decode")
        assert (order["output"], order["source"]) == ([7], "unix:/node0")
        await rig.started(entry)
        await rig.token(entry, 8, "length")
        assert [f["tokens"] for f in rig.client.of("tokens")] == [[7], [8]]
        (finished,) = rig.client.of("finished")
        assert (finished["reason"], finished["output_tokens"]) == ("length", 2)
        assert len(rig.controller.ledger) == 0

    asyncio.run(main())


def test_a_dead_decode_node_costs_no_token_and_none_is_heard_twice() -> None:
    async def main() -> None:
        rig = Rig("1P1D")
        entry = rig.submit()
        await rig.prefilled(entry)
        await rig.started(entry)
        await rig.token(entry, 8)
        dead, attempt = str(entry.node), entry.attempt
        rig.lose(dead)
        assert rig.engines["node0"].of("prefill")[-1]["output"] == [7, 8]
        await rig.token(entry, 99, node=dead, attempt=attempt)
        assert [f["tokens"] for f in rig.client.of("tokens")] == [[7], [8]], "a stale token"
        await rig.started(entry, cached_tokens=48)
        await rig.token(entry, 9, "length")
        (finished,) = rig.client.of("finished")
        assert finished["timings"]["cached_tokens"] == 0, "the first prefill's word counts"

    asyncio.run(main())


def test_waits_of_all_placements_add_up() -> None:
    async def main() -> None:
        rig = Rig("2P1D")
        entry = rig.submit()
        rig.now = 3.0
        rig.lose(str(entry.node))  # queued there for 3 s
        rig.now = 4.0
        await rig.started(entry, queue=0.5)
        await rig.token(entry, 7, "length")
        (finished,) = rig.client.of("finished")
        assert finished["timings"]["queue"] == 3.5

    asyncio.run(main())


def test_a_role_change_moves_what_is_queued() -> None:
    async def main() -> None:
        rig = Rig("2P1D")
        entry = rig.submit()
        node = str(entry.node)
        rig.engines[node].answers["withdraw"] = {"withdrawn": True}
        change = await rig.controller.set_role(node, Role.DECODE)
        assert change is not None
        assert (change.moved_requests, change.failed_requests) == (1, 0)
        assert entry.node not in (node, None)
        assert (change.drain_s, change.blocks_lost) == (0.0, 0)

    asyncio.run(main())


def test_an_engine_too_slow_to_answer_a_role_change_loses_its_queued_request() -> None:
    async def main() -> None:
        rig = Rig("2P1D")
        entry = rig.submit()
        node, attempt = str(entry.node), entry.attempt
        rig.engines[node].answers["withdraw"] = PeerError("no answer in 5 s")
        await rig.controller.set_role(node, Role.DECODE)
        assert entry.node not in (node, None), "somebody must run it"
        assert rig.engines[node].of("cancel") == [{"request": "r"}]
        await rig.token(entry, 99, node=node, attempt=attempt)
        assert rig.client.of("tokens") == []

    asyncio.run(main())


def test_an_engine_too_slow_to_answer_keeps_a_request_that_has_started() -> None:
    async def main() -> None:
        rig = Rig("2P1D")
        entry = rig.submit()
        node = str(entry.node)
        rig.engines[node].answers["withdraw"] = PeerError("no answer in 5 s")
        changing = asyncio.create_task(rig.controller.set_role(node, Role.DECODE))
        await asyncio.create_task(rig.started(entry))  # the word that it runs was on its way
        await changing
        assert entry.node == node
        assert rig.engines[node].of("cancel") == []
        await rig.token(entry, 7, "length")
        assert len(rig.client.of("finished")) == 1

    asyncio.run(main())


def test_any_number_of_role_changes_fails_no_queued_request() -> None:
    async def main() -> None:
        rig = Rig("2P1D")
        entry = rig.submit()
        for wire in rig.engines.values():
            wire.answers["withdraw"] = {"withdrawn": True}
        for _ in range(40):
            node = str(entry.node)
            await rig.controller.set_role(node, Role.DECODE)
            await rig.controller.set_role(node, Role.PREFILL)
        assert rig.client.of("failed") == []
        assert entry.node is not None

    asyncio.run(main())


def test_a_request_that_started_meanwhile_finishes_in_place() -> None:
    async def main() -> None:
        rig = Rig("1P1D")
        entry = rig.submit()
        rig.engines["node0"].answers["withdraw"] = {"withdrawn": False}
        changing = asyncio.create_task(rig.controller.set_role("node0", Role.DECODE))
        telling = asyncio.create_task(rig.prefilled(entry))  # was in the socket already
        change = await changing
        await telling
        assert rig.client.of("failed") == []
        assert change is not None
        assert change.moved_requests == 0
        assert entry.phase is Phase.DECODE

    asyncio.run(main())


def test_a_running_request_is_waited_for_and_lost_blocks_are_the_stores_word() -> None:
    async def main() -> None:
        rig = Rig("2P1D")
        entry = rig.submit()
        node = str(entry.node)
        await rig.started(entry)
        rig.stores[node].answers["missing"] = {"missing": 3}
        rig.engines[node].answers["withdraw"] = {"withdrawn": False}
        rig.now = 1.0
        change = await rig.controller.set_role(node, Role.DECODE)
        assert change is not None
        assert change.drain_s is None
        rig.now = 3.0
        await rig.token(entry, 7, "length")
        assert (change.drain_s, change.blocks_lost, change.failed_requests) == (2.0, 3, 0)

    asyncio.run(main())


def test_only_prefetches_that_brought_blocks_count() -> None:
    async def main() -> None:
        rig = Rig("1P1D")
        store = StoreConnection(rig.controller, rig.stores["node0"])  # type: ignore[arg-type]
        for blocks, seconds in ((0, 5.0), (4, 0.01)):
            fields = {"blocks": blocks, "seconds": seconds}
            await store.handle(rig.stores["node0"], "prefetched", fields)  # type: ignore[arg-type]
        assert rig.controller.prefetch == {"count": 1, "blocks": 4, "seconds": 0.01}

    asyncio.run(main())


def test_who_connects_is_told_the_full_set_of_counted_blocks() -> None:
    async def main() -> None:
        rig = Rig("1P1D")
        rig.submit()
        again = Wire("node0")
        StoreConnection(rig.controller, again).opened()  # type: ignore[arg-type]
        (told,) = again.of("counted")
        assert told["reset"] is True
        assert set(split_keys(told["counted"])) == set(rig.controller.prompt_keys(PROMPT))

    asyncio.run(main())


def test_a_client_that_leaves_takes_its_requests_along() -> None:
    async def main() -> None:
        rig = Rig("1P1D")
        entry = rig.submit()
        ClientConnection(rig.controller, rig.client).closed()  # type: ignore[arg-type]
        assert len(rig.controller.ledger) == 0
        assert rig.engines[str(entry.node)].of("cancel") == [{"request": "r"}]

    asyncio.run(main())


def test_keys_travel_as_one_string() -> None:
    keys = tuple(bytes([i]) * 32 for i in range(5))
    assert split_keys(join_keys(keys)) == keys
