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
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial, singledispatchmethod

from evolving_infra.cluster.engine_thread import EngineThread, Iteration
from evolving_infra.cluster.hasher import block_hasher
from evolving_infra.cluster.messages import join_keys, sampling_from_map, split_keys
from evolving_infra.cluster.process import guarded
from evolving_infra.cluster.store_link import StoreLink
from evolving_infra.cluster.writer import Writer
from evolving_infra.config import ClusterConfig
from evolving_infra.engine import request as eng
from evolving_infra.errors import EvolvingInfraError
from evolving_infra.kv.channel import Channel, Fields
from evolving_infra.kv.handoff import open_handoff
from evolving_infra.ops.host_blocks import HostBlocks
from evolving_infra.types import BlockKey

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Placement:
    """One request on this node. ``release`` ends the lease on the blocks it is restored from."""

    attempt: int
    op: str
    arrived: float
    fetch_s: float = 0.0
    fetched_blocks: int = 0
    release: Callable[[], None] | None = None
    preparing: asyncio.Task[None] | None = None
    cached_tokens: int = 0
    restored_tokens: int = 0
    admitted: float = 0.0


class Node:
    """One node's engine seen from asyncio."""

    def __init__(self, config: ClusterConfig, engine: EngineThread, link: StoreLink) -> None:
        self._config = config
        self._engine = engine
        self._link = link
        self._hasher = block_hasher(config.engine)
        self._placements: dict[str, Placement] = {}
        self._measured: dict[str, list[dict[str, float]]] = {"prefill": [], "decode": []}
        self._channel: Channel | None = None
        self.writer = Writer(config.engine.layout, engine, link)

    # -- from the controller -----------------------------------------------------------------

    async def opened(self, channel: Channel) -> None:
        """A controller is there. What ran for an earlier one is dropped: it placed it elsewhere."""
        self._channel = channel
        for request in list(self._placements):
            self._cancel(request)
        keys = await self._engine.ask(lambda engine, now: engine.cached_keys())
        channel.tell("l1", stored=join_keys(keys), removed=b"")

    async def handle(self, channel: Channel, op: str, fields: Fields) -> Fields | None:
        """What the controller says."""
        if op in ("prefill", "decode"):
            self._accept(op, fields)
        elif op == "withdraw":
            return {"withdrawn": await self._withdraw(fields["request"], fields["attempt"])}
        elif op == "cancel":
            self._cancel(fields["request"])
        elif op == "counted":
            self._count(split_keys(fields["counted"]), split_keys(fields["uncounted"]))
        elif op == "stats":
            counters = await self._engine.ask(lambda engine, now: asdict(engine.counters))
            return {**counters, "write_dropped": self.writer.dropped}
        return None

    def _count(self, counted: tuple[BlockKey, ...], uncounted: tuple[BlockKey, ...]) -> None:
        """The device cache follows the same policy as the host pool."""
        if self._config.store.eviction == "counted":
            self._engine.post(lambda engine, now: engine.set_counted(counted, True))
            self._engine.post(lambda engine, now: engine.set_counted(uncounted, False))

    def _accept(self, op: str, fields: Fields) -> None:
        if fields["request"] in self._placements:
            self._cancel(fields["request"])
        prompt, output = tuple(fields["prompt"]), tuple(fields["output"])
        request = eng.EngineRequest(
            request=fields["request"],
            prompt=prompt,
            output=output,
            keys=self._hasher.chain((*prompt, *output)),
            sampling=sampling_from_map(fields["sampling"]),
            stop_after_first=op == "prefill",
        )
        placement = Placement(attempt=fields["attempt"], op=op, arrived=time.monotonic())
        self._placements[request.request] = placement
        self._engine.post(lambda engine, now: engine.submit(request, now, ready=False))
        if op == "prefill":
            prepare = self._prepare_prefill(request, placement, fields["fetches"])
        else:
            prepare = self._prepare_decode(request, placement, fields["source"])
        placement.preparing = guarded(prepare)

    async def _prepare_prefill(
        self, request: eng.EngineRequest, placement: Placement, fetches: list[tuple[str, bytes]]
    ) -> None:
        """Fetch what the plan says, then show the engine what host memory has of the prompt."""
        blocks: HostBlocks | None = None
        try:
            store = self._link.store
            if store is not None:
                started = time.monotonic()
                deadline = self._config.store.fetch_deadline_s
                calls = [
                    store.fetch(f"{request.request}/{i}", peer, split_keys(keys), deadline)
                    for i, (peer, keys) in enumerate(fetches)
                ]
                for result in await asyncio.gather(*calls):
                    placement.fetched_blocks += result.fetched_blocks
                if fetches:
                    placement.fetch_s = time.monotonic() - started
                blocks, lease = await store.host_blocks(request.keys)
                placement.release = partial(store.release, lease)
        except EvolvingInfraError as error:
            log.info("%s: fetch failed, recomputing: %s", request.request, error)
        self._ready(request.request, blocks, 0)

    async def _prepare_decode(
        self, request: eng.EngineRequest, placement: Placement, source: str | None
    ) -> None:
        """Take the prompt's KV from the node that prefilled it, partial last block included."""
        blocks: HostBlocks | None = None
        tail_tokens = 0
        try:
            if source is not None:
                known = len(request.prompt) + len(request.output) - 1
                tail_tokens = known % self._config.engine.page_size
                full = request.keys[: known // self._config.engine.page_size]
                tail = None
                if tail_tokens:
                    tokens = (*request.prompt, *request.output)[known - tail_tokens : known]
                    tail = self._hasher.tail_key(full[-1] if full else None, tokens)
                peer = await self._link.peer(source)
                handoff = await open_handoff(peer, full, tail)
                placement.release = partial(peer.release, handoff.lease)
                blocks, tail_tokens = handoff.blocks, tail_tokens if handoff.has_tail else 0
        except EvolvingInfraError as error:
            log.info("%s: hand-off failed, recomputing: %s", request.request, error)
            blocks, tail_tokens = None, 0
        self._ready(request.request, blocks, tail_tokens)

    def _ready(self, request: str, blocks: HostBlocks | None, tail_tokens: int) -> None:
        self._engine.post(lambda engine, now: engine.ready(request, blocks, tail_tokens, now))

    async def _withdraw(self, request: str, attempt: int) -> bool:
        placement = self._placements.get(request)
        if placement is None or placement.attempt != attempt:
            return False
        if not await self._engine.ask(lambda engine, now: engine.withdraw(request)):
            return False
        self._forget(request)
        return True

    def _cancel(self, request: str) -> None:
        self._engine.post(lambda engine, now: engine.abort(request))
        self._forget(request)

    def _forget(self, request: str) -> None:
        placement = self._placements.pop(request, None)
        if placement is not None:
            if placement.preparing is not None:
                placement.preparing.cancel()
            self._release(placement)

    def _release(self, placement: Placement) -> None:
        if placement.release is not None:
            placement.release()
            placement.release = None

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

    def _tell(self, op: str, request: str, **fields: object) -> None:
        placement = self._placements.get(request)
        if placement is not None and self._channel is not None:
            self._channel.tell(op, request=request, attempt=placement.attempt, **fields)

    @singledispatchmethod
    def _on(self, event: eng.EngineEvent) -> None:
        raise AssertionError(f"no reaction to {event}")

    @_on.register
    def _(self, event: eng.Admitted) -> None:
        placement = self._placements.get(event.request)
        if placement is None:
            return
        self._release(placement)
        if placement.op == "prefill":
            timings = {
                "queue": event.queue_wait,
                "fetch": placement.fetch_s,
                "exposed": min(event.exposed, placement.fetch_s),
                "cached_tokens": event.cached_tokens,
                "fetched_blocks": placement.fetched_blocks,
            }
        else:
            timings = {"handoff": time.monotonic() - placement.arrived}
        placement.admitted = placement.arrived + event.queue_wait
        placement.cached_tokens = event.cached_tokens
        placement.restored_tokens = event.restored_tokens
        self._tell("started", event.request, timings=timings)

    @_on.register
    def _(self, event: eng.TokensOut) -> None:
        placement = self._placements.get(event.request)
        if placement is None:
            return
        since_admitted = time.monotonic() - placement.admitted
        self._tell(
            "tokens",
            event.request,
            tokens=event.tokens,
            finish=event.finish,
            since_admitted=since_admitted,
        )
        if event.finish is not None:
            self._forget(event.request)

    @_on.register
    def _(self, event: eng.PrefillDone) -> None:
        self.writer.after_writes(lambda: self._prefill_done(event.request))

    def _prefill_done(self, request: str) -> None:
        placement = self._placements.get(request)
        if placement is not None:
            self._tell(
                "prefill_done",
                request,
                cached_tokens=placement.cached_tokens,
                restored_tokens=placement.restored_tokens,
            )
            self._forget(request)

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
        self._tell("failed", event.request, text=event.text)
        self._forget(event.request)
