"""One request inside the engine: its tokens, pages, and how far it is."""

from evolving_infra.engine.request import BlockHasher, EngineRequest
from evolving_infra.ops.host_blocks import HostBlocks
from evolving_infra.types import EOS_TOKEN, BlockKey


class Sequence:
    """Mutable. ``tokens`` is prompt and output, ``computed`` how many of them have KV."""

    def __init__(self, request: EngineRequest, page_size: int, now: float, ready: bool) -> None:
        self.request = request
        self.name = request.request
        self.page_size = page_size
        self.tokens = [*request.prompt, *request.output]
        self.keys = list(request.keys)
        self.pages: list[int] = []
        self.computed = 0
        self.published = 0
        """Complete blocks that were entered into the prefix cache, or found there."""
        self.submitted = now
        self.ready = ready
        self.restorable: HostBlocks | None = None
        self.tail_tokens = 0
        self.admissible_since: float | None = None
        self.exposed = 0.0
        self.was_admitted = False

    @property
    def remaining(self) -> int:
        """Tokens without KV; 1 when the next token is only waiting for one more."""
        return len(self.tokens) - self.computed

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def decodes(self) -> bool:
        """True if its next iteration is a decode step."""
        return self.remaining == 1 and self.generated > 0

    @property
    def reusable_blocks(self) -> int:
        """Complete blocks that may be reused: the last token is always computed."""
        return min((len(self.tokens) - 1) // self.page_size, len(self.keys))

    def host_end(self, first: int) -> int:
        """End of the run of reusable complete blocks that host memory has from ``first`` on."""
        if self.restorable is None:
            return first
        complete = len(self.restorable) - (self.tail_tokens > 0)
        return max(first, min(self.restorable.run_end(first), complete, self.reusable_blocks))

    @property
    def pages_needed(self) -> int:
        """Pages for the KV of all present tokens."""
        return -(-len(self.tokens) // self.page_size)

    def complete_keys(self, hasher: BlockHasher) -> None:
        """Add the keys of complete blocks that have none yet."""
        for block in range(len(self.keys), len(self.tokens) // self.page_size):
            tokens = self.tokens[block * self.page_size : (block + 1) * self.page_size]
            self.keys.append(hasher.extend(self.keys[-1] if self.keys else None, tokens))

    def tail(self, hasher: BlockHasher) -> tuple[BlockKey, int, int] | None:
        """Key, page and tokens of the last block whose KV is not complete, if there is one."""
        count = self.computed % self.page_size
        if count == 0:
            return None
        block = self.computed // self.page_size
        previous = self.keys[block - 1] if block else None
        tokens = self.tokens[block * self.page_size : self.computed]
        return hasher.tail_key(previous, tokens), self.pages[block], count

    def finish_reason(self) -> str | None:
        """Why the last token ends the request, or None."""
        sampling, token = self.request.sampling, self.tokens[-1]
        if token in sampling.stop_token_ids or (token == EOS_TOKEN and not sampling.ignore_eos):
            return "stop"
        return "length" if self.generated >= sampling.max_tokens else None

    def forget_kv(self) -> list[int]:
        """Back to the queue without KV; returns the pages it had."""
        pages, self.pages = self.pages, []
        self.computed = self.published = 0
        return pages
