"""Token ids for the requests of a workload, with what the model really said spliced in.

The tokens of a block are fixed the first time a request uses its id, so an equal prefix of ids is
an equal prefix of tokens. A new block continues the context it extends: where the recorded agent
sent the model's answer back as part of the next prompt, the real answer stands there, and KV that
decode produced is really reused. Everything else is made up by a counter-based hash.
"""

import hashlib
from collections.abc import Sequence
from fractions import Fraction

from evolving_infra.errors import StateError, wrong
from evolving_infra.traces.workload import TraceRequest, Workload, extends
from evolving_infra.types import BranchKind

Tokens = tuple[int, ...]


class PromptBuilder:
    """Prompts of one run of a (scaled) workload; another ``lap`` or ``salt`` has other tokens.

    Made-up tokens are bytes, in ``[0, 256)``, and depend on the workload's name, the lap, the salt
    and the block id (past the last block: the request id) only.
    """

    def __init__(self, workload: Workload, lap: int = 0, salt: str = "") -> None:
        self._workload = workload
        self._seed = f"{workload.name}\0{lap}\0{salt}"
        self._size = Fraction(workload.block_size)
        self._requests = {request.request: request for request in workload.requests}
        self._follows = _followed(workload)
        self._blocks: dict[int, Tokens] = {}
        self._prompts: dict[str, Tokens] = {}
        self._said: dict[str, Tokens] = {}

    def prompt(self, request: str) -> Tokens:
        """The prompt, ``input_tokens`` long; the same again if asked again.

        Answers known by now are spliced in: ask when the request is sent.
        """
        if request not in self._prompts:
            self._prompts[request] = self._build(self._found(request))
        return self._prompts[request]

    def answered(self, request: str, output: Sequence[int]) -> None:
        """The model's answer to ``request``. ``StateError`` if its prompt was never asked for."""
        self._found(request)
        if request not in self._prompts:
            raise StateError(f"{request} was answered before its prompt was built")
        self._said[request] = tuple(output)

    def _found(self, request: str) -> TraceRequest:
        if request not in self._requests:
            raise wrong("request", f"one of {self._workload.name}", request)
        return self._requests[request]

    def _build(self, request: TraceRequest) -> Tokens:
        source = self._follows.get(request.request)
        context: Tokens = ()
        if source is not None and source in self._prompts:
            context = self._prompts[source] + self._said.get(source, ())
        tokens: list[int] = []
        for index, block in enumerate(request.block_ids):
            start = int(index * self._size)
            if start >= request.input_tokens:
                break
            end = min(int((index + 1) * self._size), request.input_tokens)
            known = self._blocks.get(block, ())
            if len(known) < end - start:
                at = start + len(known)
                known += self._new(context, f"block {block}", start, at, end)
                self._blocks[block] = known
            tokens += known[: end - start]
        start = len(tokens)
        tokens += self._new(
            context, f"end of {request.request}", start, start, request.input_tokens
        )
        return tuple(tokens)

    def _new(self, context: Tokens, label: str, start: int, at: int, end: int) -> Tokens:
        """Tokens at positions ``[at, end)`` of a piece that starts at ``start``."""
        said = context[at:end]
        made_up = self._made_up(label, end - start)
        return said + made_up[at + len(said) - start :]

    def _made_up(self, label: str, count: int) -> Tokens:
        """``count`` tokens; a longer piece of the same label starts with the shorter one."""
        digests = (
            hashlib.sha256(f"{self._seed}\0{label}\0{counter}".encode()).digest()
            for counter in range(-(-count // 32))
        )
        return tuple(b"".join(digests)[:count])


def _followed(workload: Workload) -> dict[str, str]:
    """For each request the one whose context and answer it continues, if any.

    That is the request before it in its branch, unless the context was rewritten in between; for
    the first of a fork, the request of the parent whose whole context it has, the longest.
    """
    followed: dict[str, str] = {}
    branches: dict[str, list[TraceRequest]] = {}
    for request in workload.requests:
        own = branches.setdefault(request.branch, [])
        candidates = [item for item in own[-1:] if item.version == request.version]
        if not own and request.kind is BranchKind.FORK and request.parent_branch is not None:
            candidates = branches[request.parent_branch]
        whole = [
            (workload.blocks_in(item), index, item)
            for index, item in enumerate(candidates)
            if extends(workload.blocks_in(item), item, request)
        ]
        if whole:
            followed[request.request] = max(whole)[2].request
        own.append(request)
    return followed
