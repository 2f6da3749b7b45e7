"""What goes into an engine and what comes out: requests, events, measurements. Frozen values."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from evolving_infra.types import BlockKey, SamplingParams


class BlockHasher(Protocol):
    """Keys token blocks (design section 5); ``previous_key`` None means the first block."""

    def chain(self, tokens: Sequence[int]) -> tuple[BlockKey, ...]:
        """Keys of all complete blocks of ``tokens``."""

    def extend(self, previous_key: BlockKey | None, block_tokens: Sequence[int]) -> BlockKey:
        """Key of the complete block after ``previous_key``."""

    def tail_key(self, previous_key: BlockKey | None, tail_tokens: Sequence[int]) -> BlockKey:
        """Key of a last block that is not complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One request. ``output`` was already generated elsewhere and counts towards ``max_tokens``.

    ``keys``: complete blocks of prompt and output, at most all of them. ``stop_after_first``: leave
    the engine after one token; the request goes on at a decode node.
    """

    request: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    keys: tuple[BlockKey, ...]
    sampling: SamplingParams
    stop_after_first: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """The request left the queue and its host blocks are no longer read. Once per request.

    ``exposed``: seconds it could have started but for its fetch. ``cached_tokens`` is the sum of
    ``l1_tokens`` and ``restored_tokens``; ``missed_blocks`` were offered by host memory but wrong.
    """

    request: str
    queue_wait: float
    exposed: float
    cached_tokens: int
    l1_tokens: int
    restored_tokens: int
    missed_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensOut:
    """New tokens. ``finish`` is ``stop`` (the end or stop token is the last one) or ``length``."""

    request: str
    tokens: tuple[int, ...]
    finish: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillDone:
    """A ``stop_after_first`` request left unfinished; its only token came in ``TokensOut`` before.

    All of its prompt's KV that is not restored was named by ``BlocksFilled`` before.
    """

    request: str
    token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksFilled:
    """Pages that hold KV which host memory may lack. Each is pinned until ``Engine.release``.

    These are the blocks an iteration computed, and of a ``stop_after_first`` request also those
    it found in the prefix cache, because its decode node is served from host memory.
    ``token_counts`` is the page size, or fewer for the last block of a ``stop_after_first`` prompt.
    """

    request: str
    keys: tuple[BlockKey, ...]
    pages: tuple[int, ...]
    token_counts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksAdded:
    """Blocks that device memory (L1) holds from now on."""

    keys: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksEvicted:
    """Blocks that device memory (L1) no longer holds."""

    keys: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempted:
    """Device memory ran out: the request is back at the queue's head and will be recomputed."""

    request: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The request can never run here. ``text`` is one sentence."""

    request: str
    text: str


EngineEvent = (
    Admitted
    | TokensOut
    | PrefillDone
    | BlocksFilled
    | BlocksAdded
    | BlocksEvicted
    | Preempted
    | Failed
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one iteration computed: the terms of the iteration-time model (design section 7)."""

    uncached_tokens: int
    """Prefill tokens computed."""
    pairs: int
    """Query-key pairs of the prefill: t_uc * t_c + t_uc (t_uc + 1) / 2, summed over requests."""
    restored_tokens: int
    """Tokens restored from host memory at admission."""
    running: int
    """Requests that decoded one token."""
    context_tokens: int
    """Context lengths of those, summed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Totals since the start, in tokens or events, and the present state, in pages or requests."""

    prefill_tokens: int
    decode_tokens: int
    l1_tokens: int
    restored_tokens: int
    missed_blocks: int
    preemptions: int
    free_pages: int
    cached_pages: int
    held_pages: int
    running: int
    queued: int
