"""The asyncio side of an engine process: fetch while queued, hand-off, write-through.

controller ── prefill/decode ──> Node ── submit(ready=False) ──> engine thread
                                  │ fetch peer L2 -> own L2, or hand-off from the prefill node
                                  └─ ready(host blocks) ───────> restore at admission
engine thread ── events ──> Node ── tokens, prefill_done ──> controller
                             └─ filled pages ──> Writer ──> own L2
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import singledispatchmethod

from evolving_infra.cluster.counted import CountedBlocks
from evolving_infra.cluster.engine_thread import EngineThread, Iteration
from evolving_infra.cluster.hasher import block_hasher
from evolving_infra.cluster.messages import join_keys, sampling_from_map
from evolving_infra.cluster.prepare import Prepared, Preparer
from evolving_infra.cluster.process import guarded
from evolving_infra.cluster.store_link import StoreLink
from evolving_infra.cluster.writer import Writer
from evolving_infra.config import ClusterConfig
from evolving_infra.engine import request as eng
from evolving_infra.engine.engine import Engine
from evolving_infra.errors import InputError
from evolving_infra.kv.channel import Channel, Fields
from evolving_infra.types import BlockKey

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Placement:
    """One request on this node, and what was prepared for it.

    The engine knows it as ``name``, which no other placement of the request shares: what a step
    still says about one that was cancelled can't be taken for the next one's.
    """

    request: str
    attempt: int
    op: str
    arrived: float
    prepared: Prepared = field(default_factory=Prepared)
    cached_tokens: int = 0
    restored_tokens: int = 0
    admitted: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.request}#{self.attempt}"


class Node:
    """One node's engine seen from asyncio."""

    def __init__(self, config: ClusterConfig, engine: EngineThread, link: StoreLink) -> None:
        self._config = config
        self._engine = engine
        self._link = link
        self._hasher = block_hasher(config.engine)
        self._preparer = Preparer(link, self._hasher, config.store.fetch_deadline_s)
        self._placements: dict[str, Placement] = {}
        """By name."""
        self._measured: dict[str, list[dict[str, float]]] = {"prefill": [], "decode": []}
        self._channel: Channel | None = None
        self._preparing: set[asyncio.Task[None]] = set()
        self._counted = CountedBlocks(self._set_counted)
        self.writer = Writer(config.engine.layout, engine, link)

    # -- from the controller -----------------------------------------------------------------

    async def opened(self, channel: Channel) -> None:
        """A controller is there. What ran for an earlier one is dropped: it placed it elsewhere."""
        self._channel = channel
        for placement in list(self._placements.values()):
            self._cancel(placement)
        self._engine.post_back(
            lambda engine, now: engine.cached_keys(), lambda keys: self._l1(keys, ())
        )

    async def handle(self, channel: Channel, op: str, fields: Fields) -> Fields | None:
        """What the controller says."""
        if op in ("prefill", "decode"):
            self._accept(op, fields)
        elif op == "withdraw":
            return {"withdrawn": await self._withdraw(fields["request"], fields["attempt"])}
        elif op == "cancel":
            for placement in list(self._placements.values()):
                if placement.request == fields["request"]:
                    self._cancel(placement)
        elif op == "counted":
            self._counted.told(fields)
        elif op == "stats":
            counters = await self._engine.ask(lambda engine, now: asdict(engine.counters))
            return {**counters, "write_dropped": self.writer.dropped}
        return None

    def _set_counted(self, keys: Iterable[BlockKey], counted: bool) -> None:
        """The device cache follows the same policy as the host pool."""
        if self._config.store.eviction == "counted":
            self._engine.post(lambda engine, now: engine.set_counted(keys, counted))

    def _accept(self, op: str, fields: Fields) -> None:
        placement = Placement(
            request=fields["request"],
            attempt=fields["attempt"],
            op=op,
            arrived=time.monotonic(),
        )
        self._placements[placement.name] = placement
        prompt, output = tuple(fields["prompt"]), tuple(fields["output"])
        request = eng.EngineRequest(
            request=placement.name,
            prompt=prompt,
            output=output,
            keys=self._hasher.chain((*prompt, *output)),
            sampling=sampling_from_map(fields["sampling"]),
            stop_after_first=op == "prefill",
        )
        self._engine.post_back(
            lambda engine, now: _submit(engine, request, now),
            lambda refusal: self._refused(placement, refusal),
        )
        if op == "prefill":
            work = self._preparer.prefill(request, fields["fetches"])
        else:
            work = self._preparer.decode(request, fields["source"])
        task = guarded(self._prepare(placement, work))
        self._preparing.add(task)
        task.add_done_callback(self._preparing.discard)

    def _refused(self, placement: Placement, refusal: str | None) -> None:
        """A request that an engine won't take must not end the engine, and the next one's."""
        if refusal is not None and placement.name in self._placements:
            self._tell("failed", placement, text=refusal)
            self._forget(placement)

    async def _prepare(self, placement: Placement, work: Awaitable[Prepared]) -> None:
        placement.prepared = prepared = await work
        if placement.name not in self._placements:
            self._release(placement)  # it was taken back meanwhile
            return
        name, blocks, tail_tokens = placement.name, prepared.blocks, prepared.tail_tokens
        self._engine.post(lambda engine, now: engine.ready(name, blocks, tail_tokens, now))

    async def _withdraw(self, request: str, attempt: int) -> bool:
        placement = self._placements.get(f"{request}#{attempt}")
        if placement is None:
            return False
        name = placement.name
        if not await self._engine.ask(lambda engine, now: engine.withdraw(name)):
            return False
        self._forget(placement)
        return True

    def _cancel(self, placement: Placement) -> None:
        name = placement.name
        self._engine.post(lambda engine, now: engine.abort(name))
        self._forget(placement)

    def _forget(self, placement: Placement) -> None:
        if self._placements.pop(placement.name, None) is not None:
            self._release(placement)

    def _release(self, placement: Placement) -> None:
        """The engine reads the prepared host blocks no more."""
        prepared = placement.prepared
        if prepared.release is not None:
            prepared.release()
            placement.prepared = replace(prepared, blocks=None, release=None)

    # -- from the engine ---------------------------------------------------------------------

    def on_iteration(self, iteration: Iteration) -> None:
        """Pass on what a step brought."""
        for event in iteration.events:
            self._on(event)
        if iteration.measured is not None:
            self._measure(iteration)

    def _measure(self, iteration: Iteration) -> None:
        measured = iteration.measured
        assert measured is not None, "only called with a measurement"
        if measured.uncached_tokens:
            self._measured["prefill"].append(
                {
                    "seconds": iteration.seconds,
                    "uncached_tokens": measured.uncached_tokens,
                    "pairs": measured.pairs,
                    "restored_tokens": measured.restored_tokens,
                }
            )
        elif measured.running:
            self._measured["decode"].append(
                {
                    "seconds": iteration.seconds,
                    "running": measured.running,
                    "context_tokens": measured.context_tokens,
                }
            )

    def flush_measured(self) -> None:
        """Report the iterations since the last flush; called a few times a second."""
        if self._channel is not None and (self._measured["prefill"] or self._measured["decode"]):
            self._channel.tell("measured", **self._measured)
        self._measured = {"prefill": [], "decode": []}

    def _tell(self, op: str, placement: Placement, **fields: object) -> None:
        if self._channel is not None:
            who = {"request": placement.request, "attempt": placement.attempt}
            self._channel.tell(op, **who, **fields)

    @singledispatchmethod
    def _on(self, event: eng.EngineEvent) -> None:
        raise AssertionError(f"no reaction to {event}")

    @_on.register
    def _(self, event: eng.Admitted) -> None:
        placement = self._placements.get(event.request)
        if placement is None:
            return
        placement.admitted = placement.arrived + event.queue_wait
        placement.cached_tokens = event.cached_tokens
        placement.restored_tokens = event.restored_tokens
        prepared = placement.prepared
        self._release(placement)
        if placement.op == "prefill":
            timings = {
                "queue": event.queue_wait,
                "fetch": prepared.fetch_s,
                "exposed": min(event.exposed, prepared.fetch_s),
                "cached_tokens": event.cached_tokens,
                "fetched_blocks": prepared.fetched_blocks,
            }
        else:
            timings = {"handoff": time.monotonic() - placement.arrived}
        self._tell("started", placement, timings=timings)

    @_on.register
    def _(self, event: eng.TokensOut) -> None:
        placement = self._placements.get(event.request)
        if placement is None:
            return
        self._tell(
            "tokens",
            placement,
            tokens=event.tokens,
            finish=event.finish,
            since_admitted=time.monotonic() - placement.admitted,
        )
        if event.finish is not None:
            self._forget(placement)

    @_on.register
    def _(self, event: eng.PrefillDone) -> None:
        placement = self._placements.get(event.request)
        if placement is not None:
            self.writer.after_writes(lambda: self._prefill_done(placement))

    def _prefill_done(self, placement: Placement) -> None:
        """The prompt's KV is in host memory: a decode node can take it from there."""
        if placement.name in self._placements:
            self._tell(
                "prefill_done",
                placement,
                cached_tokens=placement.cached_tokens,
                restored_tokens=placement.restored_tokens,
            )
            self._forget(placement)

    @_on.register
    def _(self, event: eng.BlocksFilled) -> None:
        self.writer.put(event.keys, event.pages, event.token_counts)

    @_on.register
    def _(self, event: eng.BlocksAdded) -> None:
        self._l1(event.keys, ())

    @_on.register
    def _(self, event: eng.BlocksEvicted) -> None:
        self._l1((), event.keys)

    def _l1(self, stored: tuple[BlockKey, ...], removed: tuple[BlockKey, ...]) -> None:
        if self._channel is not None:
            self._channel.tell("l1", stored=join_keys(stored), removed=join_keys(removed))

    @_on.register
    def _(self, event: eng.Preempted) -> None:
        log.info("%s: preempted, its KV will be recomputed", event.request)

    @_on.register
    def _(self, event: eng.Failed) -> None:
        placement = self._placements.get(event.request)
        if placement is not None:
            self._tell("failed", placement, text=event.text)
            self._forget(placement)


def _submit(engine: Engine, request: eng.EngineRequest, now: float) -> str | None:
    """Queue a request whose KV is being prepared; the sentence if the engine refuses it."""
    try:
        engine.submit(request, now, ready=False)
    except InputError as error:
        return str(error)
    return None
