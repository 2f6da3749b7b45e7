"""What became of one replayed request."""

from dataclasses import dataclass, field

from evolving_infra.types import RequestTimings, SamplingParams

Tokens = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One request, finished or failed. Times are seconds as the client saw them.

    ``cached_tokens`` is how many prompt tokens the cluster did not compute, ``ideal_tokens`` how
    many an unlimited cache would have had when the request was sent. A failure has ``error`` and
    the HTTP ``status`` (0 if there was no answer).
    """

    request: str
    prompt: Tokens
    output: Tokens
    sampling: SamplingParams
    ideal_tokens: int
    cached_tokens: int = 0
    ttft: float = 0.0
    e2e: float = 0.0
    timings: RequestTimings = field(default_factory=RequestTimings)
    status: int = 200
    error: str | None = None

    @property
    def failed(self) -> bool:
        return self.error is not None

    @property
    def lost_tokens(self) -> int:
        """Prompt tokens computed again although some earlier request had produced their KV."""
        return max(0, self.ideal_tokens - self.cached_tokens)
