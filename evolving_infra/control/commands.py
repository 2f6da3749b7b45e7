"""What the control plane wants done. Frozen values: no socket, tensor or callback inside."""

from dataclasses import dataclass

from evolving_infra.types import BlockKey, Phase, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchSource:
    """Blocks ``[first, first + count)`` of the prompt's chain are to be read from ``node``'s L2."""

    node: str
    first: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPrefill:
    """Queue the request on ``node``; fetch what it lacks while it waits.

    ``predicted_seconds`` is the predicted time to first token from now, 0 if nothing is learned.
    """

    request: str
    node: str
    fetches: tuple[FetchSource, ...]
    predicted_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StartDecode:
    """Continue the request on ``node``. ``source`` holds its prompt's KV, None: recompute.

    ``node == source`` means: go on where the prefill ran.
    """

    request: str
    node: str
    source: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdraw:
    """Take the request back if ``node`` has not started it.

    Answered by RequestBounced, or not at all if it runs already.
    """

    request: str
    node: str
    phase: Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """Stop the request on ``node`` and free what it holds there."""

    request: str
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetch:
    """Copy these blocks from ``source``'s L2 to ``node``'s while the branch waits for its tools."""

    node: str
    source: str
    branch: str
    keys: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SetCounted:
    """Counts of copies on ``node`` left 0 (``counted``) or came back to it (``uncounted``)."""

    node: str
    counted: tuple[BlockKey, ...]
    uncounted: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleChanged:
    """The router treats ``node`` as ``after`` from now on."""

    node: str
    before: Role
    after: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchExpired:
    """A branch was idle beyond its lease and counts as ended."""

    branch: str


Command = (
    StartPrefill
    | StartDecode
    | Withdraw
    | Cancel
    | Prefetch
    | SetCounted
    | RoleChanged
    | BranchExpired
)
