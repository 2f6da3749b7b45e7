"""The embedded symmetric engine: requests in, tokens and blocks out, one ``step`` at a time.

    submit ─> queue ── ready ──> admit: prefix cache, restore ─> prefill chunks ─> decode ─> out
                ^                                                    │
                └──────────────── preempted (recomputed) ────────────┘

Pure compute: no thread, no socket, no clock. A request's tokens depend on its own tokens and
sampling only (design section 8).
"""

from collections.abc import Iterable

from evolving_infra.config import EngineConfig
from evolving_infra.engine.invariance import check_invariance
from evolving_infra.engine.model import Model, Segment, device_pools
from evolving_infra.engine.pages import PagePool
from evolving_infra.engine.request import (
    Admitted,
    BlockHasher,
    BlocksAdded,
    BlocksEvicted,
    BlocksFilled,
    Counters,
    EngineEvent,
    EngineRequest,
    Failed,
    Measured,
    Preempted,
    PrefillDone,
    TokensOut,
)
from evolving_infra.engine.restore import restore
from evolving_infra.engine.sampling import pick
from evolving_infra.engine.schedule import NOT_READY, Schedule, Work
from evolving_infra.engine.sequence import Sequence
from evolving_infra.errors import StateError, wrong
from evolving_infra.ops.host_blocks import HostBlocks
from evolving_infra.types import VOCAB_USED, BlockKey


class Engine:
    """One engine with its TP ranks. ``pools[rank][layer]`` is the device memory.

    ``fault`` is passed on to restores. Raises ``BackendError`` if this machine's matrix products
    are not batch-invariant.
    """

    def __init__(self, config: EngineConfig, hasher: BlockHasher, fault: str | None = None) -> None:
        self.config = config
        self._hasher = hasher
        self._fault = fault
        self._model = Model(config)
        check_invariance(self._model)
        self.pools = device_pools(config.layout, config.device_pages, self._model.device)
        self._pool = PagePool(config.device_pages)
        self._schedule = Schedule(config, self._pool)
        self._events: list[EngineEvent] = []
        self._idle = True
        self._totals = {
            "prefill_tokens": 0,
            "decode_tokens": 0,
            "l1_tokens": 0,
            "restored_tokens": 0,
            "missed_blocks": 0,
            "preemptions": 0,
        }
        self.measured: Measured | None = None
        """What the last step computed; None if nothing."""

    @property
    def has_work(self) -> bool:
        """False if ``step`` would do nothing until something else is called."""
        return not self._idle

    @property
    def idle_reason(self) -> str | None:
        """Why the head of the queue, or what runs, did not go on in the last step, if it idled."""
        if not self._idle or not (self._schedule.queue or self._schedule.running):
            return None
        if self._schedule.running:
            return "device pages are pinned by copies"
        head = self._schedule.queue[0]
        return self._schedule.obstacle(head) if head.ready else NOT_READY

    @property
    def counters(self) -> Counters:
        return Counters(
            **self._totals,
            free_pages=self._pool.free_pages,
            cached_pages=self._pool.cached_pages,
            held_pages=self._pool.held_pages,
            running=len(self._schedule.running),
            queued=len(self._schedule.queue),
        )

    def submit(self, request: EngineRequest, now: float, ready: bool = True) -> None:
        """Queue a request. ``ready=False``: its fetch is running, ``ready()`` will follow.

        A request that can never fit is answered by ``Failed`` in the next step.

        Raises:
            InputError: a field is wrong.
            StateError: a request of this name is here.
        """
        self._check(request)
        self._idle = False
        context = len(request.prompt) + request.sampling.max_tokens
        if context > self.config.max_context_tokens:
            text = (
                f"prompt and max_tokens need a context of {context} tokens, "
                f"the limit is {self.config.max_context_tokens}"
            )
            self._events.append(Failed(request=request.request, text=text))
            return
        sequence = Sequence(request, self.config.page_size, now, ready)
        sequence.complete_keys(self._hasher)
        self._schedule.queue.append(sequence)

    def ready(
        self, request_id: str, restorable: HostBlocks | None, tail_tokens: int, now: float
    ) -> bool:
        """The fetch of a queued request is over. False if the request is no longer queued.

        ``restorable``: host blocks of its first complete blocks, in order, some of them maybe
        missing, then one of ``tail_tokens`` tokens if that is positive. They must stay valid
        until ``Admitted``.
        """
        sequence = self._schedule.queued(request_id)
        if sequence is None:
            return False
        if sequence.ready:
            raise StateError(f"request {request_id} is ready already")
        if not 0 <= tail_tokens < self.config.page_size:
            raise wrong("tail_tokens", f"0 to {self.config.page_size - 1}", tail_tokens)
        sequence.restorable = restorable if restorable is not None and len(restorable) else None
        sequence.tail_tokens = tail_tokens if sequence.restorable is not None else 0
        sequence.ready = True
        if sequence.admissible_since is not None:
            sequence.exposed = now - sequence.admissible_since
        self._idle = False
        return True

    def withdraw(self, request_id: str) -> bool:
        """Take a request back. True if it had not started; then it is gone."""
        sequence = self._schedule.queued(request_id)
        if sequence is None or sequence.was_admitted:
            return False
        return self.abort(request_id)

    def abort(self, request_id: str) -> bool:
        """Drop a request wherever it is; no event follows. False if it is not here."""
        sequence = self._schedule.find(request_id)
        if sequence is None:
            return False
        if sequence in self._schedule.running:
            self._schedule.leave(sequence)
        else:
            self._schedule.queue.remove(sequence)
        self._idle = False
        return True

    def set_counted(self, keys: Iterable[BlockKey], counted: bool) -> None:
        """Tell which blocks active branches need: the others are evicted first."""
        self._pool.set_counted(keys, counted)

    def release(self, pages: Iterable[int]) -> None:
        """Pages of a ``BlocksFilled`` were copied (or will not be): unpin them."""
        self._pool.release(pages)
        self._idle = False

    def flush(self) -> tuple[BlockKey, ...]:
        """Empty the prefix cache except for pages in use; returns what was removed."""
        self._idle = False
        return self._pool.flush()

    def cached_keys(self) -> tuple[BlockKey, ...]:
        """Everything the prefix cache (L1) holds."""
        return self._pool.cached_keys

    def step(self, now: float) -> tuple[EngineEvent, ...]:
        """Admit what can start, compute one iteration, report."""
        restored = 0
        while (sequence := self._schedule.next_admissible(now)) is not None:
            restored += self._admit(sequence, now)
        works, preempted = self._schedule.plan()
        for sequence in preempted:
            self._totals["preemptions"] += 1
            self._events.append(Preempted(request=sequence.name))
        self.measured = _measure(works, restored) if works else None
        if works:
            self._compute(works)
        self._idle = not works
        return self._report()

    def _check(self, request: EngineRequest) -> None:
        sampling, tokens = request.sampling, (*request.prompt, *request.output)
        if self._schedule.find(request.request) is not None:
            raise StateError(f"a request {request.request} is here already")
        if not request.prompt:
            raise wrong("prompt", "at least one token", request.prompt)
        if min(tokens) < 0 or max(tokens) >= VOCAB_USED:
            raise wrong("prompt", f"token ids in [0, {VOCAB_USED})", tokens)
        if sampling.max_tokens <= len(request.output):
            raise wrong("max_tokens", f"more than {len(request.output)}", sampling.max_tokens)
        if not sampling.temperature >= 0:
            raise wrong("temperature", "0 or more", sampling.temperature)
        if not 0 < sampling.top_p <= 1:
            raise wrong("top_p", "a number in (0, 1]", sampling.top_p)
        if len(request.keys) > len(tokens) // self.config.page_size:
            raise wrong("keys", "one per complete block at most", len(request.keys))

    def _admit(self, sequence: Sequence, now: float) -> int:
        """Start a request; returns the tokens restored."""
        l1_blocks = self._schedule.admit(sequence)
        restored = restore(sequence, self.pools, self.config, self._fault)
        sequence.restorable = None
        self._publish(sequence)
        if sequence.request.stop_after_first:
            # The decode node takes the whole prompt from host memory, which may lack these.
            pairs = zip(sequence.keys[:l1_blocks], sequence.pages[:l1_blocks], strict=True)
            self._fill(sequence, list(pairs))
        self._schedule.announce(sequence)
        if sequence.was_admitted:
            return restored.tokens
        sequence.was_admitted = True
        l1_tokens = l1_blocks * self.config.page_size
        self._totals["l1_tokens"] += l1_tokens
        self._totals["restored_tokens"] += restored.tokens
        self._totals["missed_blocks"] += restored.missed_blocks
        self._events.append(
            Admitted(
                request=sequence.name,
                queue_wait=now - sequence.submitted,
                exposed=sequence.exposed,
                cached_tokens=l1_tokens + restored.tokens,
                l1_tokens=l1_tokens,
                restored_tokens=restored.tokens,
                missed_blocks=restored.missed_blocks,
            )
        )
        return restored.tokens

    def _compute(self, works: list[Work]) -> None:
        """One iteration: forward, new blocks, and a token for each sequence that is up to date."""
        segments = tuple(
            Segment(
                tokens=tuple(seq.tokens[seq.computed : seq.computed + work.count]),
                first_position=seq.computed,
                pages=tuple(seq.pages),
            )
            for work in works
            for seq in (work.sequence,)
        )
        logits = self._model.forward(segments, self.pools).cpu().numpy()
        for work, row in zip(works, logits, strict=True):
            sequence = work.sequence
            sequence.computed += work.count
            self._totals["decode_tokens" if work.decodes else "prefill_tokens"] += work.count
            self._fill(sequence, self._publish(sequence))
            if sequence.remaining == 0:
                sampling, position = sequence.request.sampling, len(sequence.tokens)
                self._emit(sequence, pick(row, sampling, position))

    def _publish(self, sequence: Sequence) -> list[tuple[BlockKey, int]]:
        """Enter complete blocks into the prefix cache; returns the ones it did not have."""
        first, end = sequence.published, sequence.computed // self.config.page_size
        sequence.complete_keys(self._hasher)
        keys, pages = sequence.keys[first:end], sequence.pages[first:end]
        sequence.published = end
        self._schedule.computed(sequence, keys)
        pairs = zip(keys, pages, strict=True)
        return [(key, page) for key, page in pairs if self._pool.publish(page, key)]

    def _fill(self, sequence: Sequence, filled: list[tuple[BlockKey, int]]) -> None:
        """Report computed blocks and pin their pages until they are copied."""
        if not filled:
            return
        keys, pages = zip(*filled, strict=True)
        self._pool.hold(pages)
        counts = (self.config.page_size,) * len(keys)
        self._events.append(
            BlocksFilled(request=sequence.name, keys=keys, pages=pages, token_counts=counts)
        )

    def _emit(self, sequence: Sequence, token: int) -> None:
        """A new token: it may end the request, or its stay here."""
        sequence.tokens.append(token)
        finish = sequence.finish_reason()
        hands_over = finish is None and sequence.request.stop_after_first
        if hands_over and (tail := sequence.tail(self._hasher)) is not None:
            key, page, count = tail
            self._pool.hold((page,))
            self._events.append(
                BlocksFilled(
                    request=sequence.name, keys=(key,), pages=(page,), token_counts=(count,)
                )
            )
        self._events.append(TokensOut(request=sequence.name, tokens=(token,), finish=finish))
        if hands_over:
            self._events.append(PrefillDone(request=sequence.name, token=token))
        if hands_over or finish is not None:
            self._schedule.leave(sequence)

    def _report(self) -> tuple[EngineEvent, ...]:
        added, evicted = self._pool.drain()
        if added:
            self._events.append(BlocksAdded(keys=added))
        if evicted:
            self._events.append(BlocksEvicted(keys=evicted))
        events, self._events = self._events, []
        return tuple(events)


def _measure(works: list[Work], restored: int) -> Measured:
    """Composition of an iteration, before it is computed."""
    prefills = [(work.sequence.computed, work.count) for work in works if not work.decodes]
    decodes = [len(work.sequence.tokens) for work in works if work.decodes]
    return Measured(
        uncached_tokens=sum(count for _, count in prefills),
        pairs=sum(count * cached + count * (count + 1) // 2 for cached, count in prefills),
        restored_tokens=restored,
        running=len(decodes),
        context_tokens=sum(decodes),
    )
