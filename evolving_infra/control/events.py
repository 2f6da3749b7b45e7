"""What the control plane is told. Frozen values; times are passed beside them, not inside.

Keys are full chains from the first block of the context, in order.
"""

from dataclasses import dataclass

from evolving_infra.types import BlockKey, BranchKind, Phase, Role, Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeJoined:
    """An engine is ready (also after a restart: its L1 is then empty).

    ``l1_blocks`` and ``l2_blocks`` are capacities in blocks of ``page_size`` tokens.
    """

    node: str
    role: Role
    page_size: int
    l1_blocks: int
    l2_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost:
    """The engine is gone: its L1 copies too, its requests must run elsewhere. L2 survives."""

    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLost:
    """The node's host pool is gone: all its L2 copies with it."""

    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksStored:
    """Copies appeared. Storing a copy again is legal and changes nothing."""

    node: str
    tier: Tier
    keys: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksRemoved:
    """Copies were evicted. Removing an unknown copy is legal and changes nothing."""

    node: str
    tier: Tier
    keys: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestArrived:
    """A request wants to run.

    ``branch`` names its context; a branch unseen so far starts here with ``kind`` and ``parent``
    (FORK and SUBAGENT need a known parent). ``version`` may rise (compaction), never fall.
    ``prompt_keys`` are the complete blocks of the prompt, ``prompt_tokens`` its length.
    """

    request: str
    branch: str
    version: int
    kind: BranchKind
    parent: str | None
    prompt_keys: tuple[BlockKey, ...]
    prompt_tokens: int
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStarted:
    """The request left the queue of ``node`` and runs there in ``phase``."""

    request: str
    node: str
    phase: Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillDone:
    """Prefill has produced the first token; the KV waits on its node for a decode node."""

    request: str
    node: str
    cached_tokens: int
    restored_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFinished:
    """All tokens are out. ``keys``: complete blocks of prompt and output whose KV exists."""

    request: str
    keys: tuple[BlockKey, ...]
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestAborted:
    """The client went away or the request failed for good. Its branch stays."""

    request: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestBounced:
    """``node`` could not run the request in ``phase`` (died, or handed it back): place it again."""

    request: str
    node: str
    phase: Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchEnded:
    """The harness says that no request of this branch will come any more."""

    branch: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleAsked:
    """An operator or a planner wants ``node`` to serve ``role`` from now on."""

    node: str
    role: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillMeasured:
    """One iteration with prefill work. Sums over its batch; ``pairs`` is the paper's A."""

    node: str
    seconds: float
    uncached_tokens: int
    pairs: int
    restored_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeMeasured:
    """One iteration with decode work only. ``running`` is the batch size B."""

    node: str
    seconds: float
    running: int
    context_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchMeasured:
    """``node`` has read ``blocks`` blocks from a peer's L2 in ``seconds``."""

    node: str
    seconds: float
    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerDue:
    """The time of ``next_timer()`` has come."""


Event = (
    NodeJoined
    | NodeLost
    | StoreLost
    | BlocksStored
    | BlocksRemoved
    | RequestArrived
    | RequestStarted
    | PrefillDone
    | RequestFinished
    | RequestAborted
    | RequestBounced
    | BranchEnded
    | RoleAsked
    | PrefillMeasured
    | DecodeMeasured
    | FetchMeasured
    | TimerDue
)
