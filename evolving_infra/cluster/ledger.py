"""The controller's book of requests: what was asked, what came out so far, where it runs."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from evolving_infra.cluster.client import Submission
from evolving_infra.errors import InputError
from evolving_infra.kv.channel import Channel
from evolving_infra.types import BlockKey, Phase, RequestTimings


@dataclass(kw_only=True)
class Entry:
    """One live request. ``attempt`` numbers its placements; ``output`` survives all of them.

    ``waiting_since``: when it began to wait for a start, ``placed_at``: when its node got it.
    """

    submission: Submission
    client: Channel
    prompt_keys: tuple[BlockKey, ...]
    arrived: float
    output: list[int] = field(default_factory=list)
    attempt: int = 0
    node: str | None = None
    phase: Phase = Phase.PREFILL
    started: bool = False
    waiting_since: float = 0.0
    placed_at: float = 0.0
    timings: RequestTimings = field(default_factory=RequestTimings)

    @property
    def request(self) -> str:
        return self.submission.request

    def place(self, node: str, phase: Phase, now: float) -> int:
        """Note a new placement and return its number."""
        self.attempt += 1
        if self.started or self.attempt == 1:
            self.waiting_since = now
        self.node, self.phase, self.started, self.placed_at = node, phase, False, now
        return self.attempt

    def note(self, **timings: Any) -> None:
        """Set some of the timings."""
        self.timings = replace(self.timings, **timings)

    def prefill_started(
        self, *, queue: float, fetch: float, exposed: float, cached_tokens: int, fetched_blocks: int
    ) -> None:
        """Add what this placement says. Waits of all placements add up, those never started too.

        What was cached is the first prefill's word: a later one also finds the output of before.
        """
        had = self.timings
        self.note(
            queue=had.queue + queue + self.placed_at - self.waiting_since,
            fetch=had.fetch + fetch,
            exposed=had.exposed + exposed,
            fetched_blocks=had.fetched_blocks + fetched_blocks,
            cached_tokens=had.cached_tokens if self.output else cached_tokens,
        )


class Ledger:
    """All live requests by id."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    def add(self, entry: Entry) -> None:
        self._entries[entry.request] = entry

    def remove(self, request: str) -> Entry | None:
        return self._entries.pop(request, None)

    def get(self, request: str) -> Entry | None:
        return self._entries.get(request)

    def check_new(self, request: str) -> None:
        """Raise ``InputError`` if a live request has this id."""
        if request in self._entries:
            raise InputError(f"request: expected an id that is not in use, got {request!r} again")

    def current(self, request: str, attempt: int, node: str) -> Entry | None:
        """The entry, if ``node`` speaks about the placement that is still valid."""
        entry = self._entries.get(request)
        if entry is None or entry.attempt != attempt or entry.node != node:
            return None
        return entry

    def at(self, node: str) -> Iterator[Entry]:
        """Requests placed on ``node``."""
        return (entry for entry in list(self._entries.values()) if entry.node == node)

    def of_client(self, client: Channel) -> Iterator[Entry]:
        """Requests that came over this connection."""
        return (entry for entry in list(self._entries.values()) if entry.client is client)

    def __len__(self) -> int:
        return len(self._entries)
