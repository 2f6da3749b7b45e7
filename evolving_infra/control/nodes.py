"""What the control plane knows of a node, and of a request that runs on one."""

from dataclasses import dataclass, field

from evolving_infra.types import BlockKey, Phase, Role


@dataclass(slots=True, kw_only=True)
class Request:
    """A live request. ``node`` is None while no node is up; ``recalled``: it was withdrawn from it.

    ``source`` is the node whose prefill produced the prompt's KV, ``since`` when the request was
    placed or started on its node, ``service_seconds`` the predicted prefill time there.
    """

    name: str
    branch: str
    prompt_keys: tuple[BlockKey, ...]
    prompt_tokens: int
    max_tokens: int
    phase: Phase = Phase.PREFILL
    node: str | None = None
    running: bool = False
    since: float = 0.0
    service_seconds: float = 0.0
    source: str | None = None
    bounces: int = 0
    recalled: bool = False


@dataclass(slots=True, kw_only=True)
class Node:
    """A node that joined at least once. ``requests`` are those placed on it, in order."""

    name: str
    role: Role
    page_size: int
    l1_blocks: int
    l2_blocks: int
    is_up: bool = True
    requests: dict[str, Request] = field(default_factory=dict)

    def queued(self) -> list[Request]:
        """Requests it was given and has not started, in order."""
        return [request for request in self.requests.values() if not request.running]

    def of_phase(self, phase: Phase) -> list[Request]:
        """Requests placed on it in ``phase``, queued or running, in order."""
        return [request for request in self.requests.values() if request.phase is phase]

    def blocks(self, request: Request) -> int:
        """Device blocks the request needs at its longest."""
        return -(-(request.prompt_tokens + request.max_tokens) // self.page_size)

    def free_blocks(self) -> int:
        """Device blocks left if every request on it grows to its longest; may be negative."""
        return self.l1_blocks - sum(self.blocks(request) for request in self.requests.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """A node as status shows it. Requests and blocks are counted, nothing is shared."""

    name: str
    role: Role
    is_up: bool
    queued: int
    prefilling: int
    decoding: int
    l1_held_blocks: int
    l2_held_blocks: int
    counted_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestView:
    """A live request as status shows it. ``node`` is None while no node is up."""

    name: str
    branch: str
    phase: Phase
    node: str | None
    running: bool
