"""What the front door sees of a cluster: requests, branch ends, role changes, state."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Protocol

from evolving_infra.types import BranchKind, RequestTimings, Role, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """One request for the cluster. ``tokens`` is the whole prompt.

    A request without a branch signal has its own branch, ended by the cluster when it finishes
    (``anonymous``).
    """

    request: str
    branch: str
    version: int
    kind: BranchKind
    parent: str | None
    anonymous: bool
    tokens: tuple[int, ...]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDelta:
    """Tokens that became available, in order, without gaps."""

    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The last item of a request. ``reason`` is ``stop`` (end or stop token) or ``length``."""

    reason: str
    prompt_tokens: int
    output_tokens: int
    timings: RequestTimings


class Cluster(Protocol):
    """The front door's view of a cluster; ``ClusterClient`` reaches a real one."""

    def submit(self, submission: Submission) -> AsyncGenerator[TokenDelta | Finish, None]:
        """Run a request. Closing the generator early aborts it.

        Raises:
            InputError: the submission is wrong (too long, version goes back, unknown parent).
            StateError: the branch has ended.
            CapacityError: no node is up.
            PeerError: the cluster went away or gave the request up.
        """

    async def end_branch(self, branch: str) -> None:
        """Release a branch's blocks. ``InputError`` if unknown, ``StateError`` if already ended."""

    async def set_role(self, node: str, role: Role) -> dict[str, Any]:
        """Change what the router sends to ``node``. ``InputError`` if the node is unknown.

        Returns ``{"node", "from", "to", "control_s"}`` when the router has switched; draining
        goes on afterwards.
        """

    async def state(self) -> dict[str, Any]:
        """Everything worth showing: see ``cluster/controller.py`` for the keys."""

    async def close(self) -> None:
        """Disconnect."""
