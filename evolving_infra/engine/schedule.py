"""Who runs next: FIFO admission, growth, preemption, and the work of one iteration.

One iteration is every running decode (one token each) plus prefill chunks of at most
``chunk_tokens``, in order of admission.
"""

from dataclasses import dataclass

from evolving_infra.config import EngineConfig
from evolving_infra.engine.pages import PagePool
from evolving_infra.engine.sequence import Sequence
from evolving_infra.types import BlockKey

TOO_MANY = "as many requests run as may"
NO_PAGES = "device pages are short or pinned"
SHARED = "its next blocks are being computed for another request"
NOT_READY = "its fetch is still running"


@dataclass(frozen=True, slots=True)
class Work:
    """The next ``count`` tokens of a sequence."""

    sequence: Sequence
    count: int
    decodes: bool


class Schedule:
    """The queue and the running sequences of one engine; each in order, oldest first."""

    def __init__(self, config: EngineConfig, pool: PagePool) -> None:
        self.queue: list[Sequence] = []
        self.running: list[Sequence] = []
        self._config = config
        self._pool = pool
        self._computing: dict[BlockKey, Sequence] = {}
        """Blocks that a running sequence has still to compute."""

    def queued(self, name: str) -> Sequence | None:
        return next((seq for seq in self.queue if seq.name == name), None)

    def find(self, name: str) -> Sequence | None:
        return next((seq for seq in (*self.queue, *self.running) if seq.name == name), None)

    def next_admissible(self, now: float) -> Sequence | None:
        """The first ready request that can start now; those not ready, or better late, are skipped.

        Notes for each one not ready that, but for its fetch, it could have started.
        """
        for sequence in self.queue:
            obstacle = self.obstacle(sequence)
            if not sequence.ready:
                if obstacle is None and sequence.admissible_since is None:
                    sequence.admissible_since = now
            elif obstacle is None:
                return sequence
            elif obstacle is not SHARED:
                return None
        return None

    def obstacle(self, sequence: Sequence) -> str | None:
        """Why a queued request, were it ready, could not start now; None if it could."""
        if len(self.running) >= self._config.max_running:
            return TOO_MANY
        cached = self._pool.match(sequence.keys[: sequence.reusable_blocks])
        reused = sequence.host_end(len(cached))
        if reused < sequence.reusable_blocks and sequence.keys[reused] in self._computing:
            return SHARED
        # One page each for those that run, or the newcomer would be preempted at once.
        wanted = sequence.pages_needed - len(cached) + len(self.running)
        return NO_PAGES if wanted > self._pool.room(besides=cached) else None

    def admit(self, sequence: Sequence) -> int:
        """Give an admissible request its pages. Returns how many blocks the prefix cache had."""
        cached = self._pool.match(sequence.keys[: sequence.reusable_blocks])
        self._pool.take(cached)
        fresh = self._pool.allocate(sequence.pages_needed - len(cached))
        sequence.pages = cached + fresh
        sequence.published = len(cached)
        sequence.computed = len(cached) * sequence.page_size
        self.queue.remove(sequence)
        self.running.append(sequence)
        return len(cached)

    def announce(self, sequence: Sequence) -> None:
        """Others that need the blocks this sequence will compute shall wait for them."""
        for key in sequence.keys[sequence.published :]:
            self._computing.setdefault(key, sequence)

    def computed(self, sequence: Sequence, keys: list[BlockKey]) -> None:
        """The sequence has computed the blocks of ``keys``, or will not."""
        for key in keys:
            if self._computing.get(key) is sequence:
                del self._computing[key]

    def leave(self, sequence: Sequence) -> None:
        """Take a running sequence out and give its pages back."""
        self.running.remove(sequence)
        self.computed(sequence, sequence.keys[sequence.published :])
        self._pool.give_back(sequence.forget_kv())

    def plan(self) -> tuple[list[Work], list[Sequence]]:
        """The next iteration's work, and who was preempted for it (back at the queue's head)."""
        preempted: list[Sequence] = []
        while (needy := self._without_page()) is not None:
            if self._pool.room():
                needy.pages += self._pool.allocate(1)
            elif len(self.running) == 1:
                # Nobody is left to preempt: the pages are pinned by copies to host memory.
                return [], preempted
            else:
                victim = self.running[-1]
                self.leave(victim)
                self.queue.insert(0, victim)
                preempted.append(victim)
        return self._work(), preempted

    def _without_page(self) -> Sequence | None:
        """The oldest running sequence whose next token has no page."""
        return next((seq for seq in self.running if len(seq.pages) < seq.pages_needed), None)

    def _work(self) -> list[Work]:
        budget = self._config.chunk_tokens
        works = []
        for sequence in self.running:
            if sequence.decodes:
                works.append(Work(sequence, 1, True))
            elif budget:
                count = min(sequence.remaining, budget)
                budget -= count
                works.append(Work(sequence, count, False))
        return works
