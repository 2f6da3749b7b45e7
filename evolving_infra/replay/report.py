"""The report of a replay: what was asked, reused, lost, waited for, and whether it was exact."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from evolving_infra.replay.exact import Exactness
from evolving_infra.replay.outcome import Outcome
from evolving_infra.traces.stats import percentile

Json = dict[str, Any]

NODE_KEYS = ("prefill_tokens", "decode_tokens", "fetched_blocks", "evicted_blocks")
ROLE_CHANGE_KEYS = ("node", "from", "to", "control_s", "drain_s", "blocks_lost", "failed_requests")


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Mean and linear percentiles in seconds; all 0 of nothing."""

    mean: float
    p50: float
    p95: float

    @staticmethod
    def of(values: Sequence[float]) -> "Spread":
        mean = sum(values) / len(values) if values else 0.0
        return Spread(mean=mean, p50=percentile(values, 50), p95=percentile(values, 95))


@dataclass(frozen=True, kw_only=True)
class TokenCounts:
    """Tokens of the requests that finished: ``prompt`` = ``cached`` + ``recomputed``.

    ``recomputed_again`` is how many more prompt tokens the nodes computed than ``recomputed`` says:
    a second time, after a failed hand-off, a preemption or the loss of a node, or for requests that
    failed. What others asked of the same cluster meanwhile counts too, and what an engine that died
    had computed is not known.
    """

    prompt: int
    cached: int
    recomputed: int
    recomputed_again: int
    output: int


@dataclass(frozen=True, kw_only=True)
class FetchSummary:
    """KV read from peers, in seconds: by requests that waited for it, and ahead of requests.

    ``exposed`` is the part of a request's fetch during which the engine could have started it.
    ``hidden_share`` is 1 - exposed / (fetches + prefetches that brought blocks),
    ``waiting_hidden_share`` is 1 - exposed / fetches; None if there were none.
    """

    count: int
    mean: float
    p95: float
    hidden_share: float | None
    waiting_hidden_share: float | None
    exposed_mean: float
    prefetch_count: int
    prefetch_seconds: float


@dataclass(frozen=True, kw_only=True)
class ReplayReport:
    """One replay. ``kv_hit``, ``ideal_kv_hit``: shares of prompt tokens; ``lost_reuse``: of ideal.

    ``role_changes`` and ``nodes`` have the keys above, the nodes also ``name`` and ``role``.
    ``failures`` and ``problems`` are sentences.
    """

    requests: int
    failed: int
    tokens: TokenCounts
    kv_hit: float
    ideal_kv_hit: float
    lost_reuse: float
    ttft: Spread
    e2e: Spread
    queue: Spread
    fetch: FetchSummary
    exact: Exactness
    role_changes: tuple[Json, ...]
    nodes: tuple[Json, ...]
    seed: int
    command: str
    seconds: float
    failures: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """No request failed, no token was inexact and nothing else went wrong (``problems``)."""
        return not (self.failed or self.exact.inexact or self.problems)

    def to_json(self) -> Json:
        """The stable keys, for machines."""
        fields = asdict(self)
        for only_shown in ("seconds", "failures", "problems"):
            del fields[only_shown]
        inexact = len(self.exact.inexact)
        return {**fields, "exact": {"checked": self.exact.checked, "inexact": inexact}}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a replay observed: outcomes, and the cluster's state before and after."""

    outcomes: tuple[Outcome, ...]
    before: Json
    after: Json
    exact: Exactness
    seconds: float
    problems: tuple[str, ...]


def summarize(measured: Measured, *, seed: int, command: str) -> ReplayReport:
    """The report of what was measured. Counters of the cluster count from before the replay.

    A request with more cached tokens than its prompt has, or fewer than none, is a problem.
    """
    finished = [outcome for outcome in measured.outcomes if not outcome.failed]
    prompt = sum(len(outcome.prompt) for outcome in finished)
    cached = sum(outcome.cached_tokens for outcome in finished)
    # KV that was produced while the request queued may be reused too: then that was possible.
    ideal = sum(max(outcome.ideal_tokens, outcome.cached_tokens) for outcome in finished)
    lost = sum(outcome.lost_tokens for outcome in finished)
    failures = [outcome for outcome in measured.outcomes if outcome.failed]
    earlier = len(measured.before.get("role_changes", ()))
    nodes = _nodes(measured.before, measured.after)
    computed = sum(node["prefill_tokens"] for node in nodes)
    return ReplayReport(
        requests=len(measured.outcomes),
        failed=len(failures),
        tokens=TokenCounts(
            prompt=prompt,
            cached=cached,
            recomputed=prompt - cached,
            recomputed_again=max(0, computed - (prompt - cached)),
            output=sum(len(outcome.output) for outcome in finished),
        ),
        kv_hit=_share(cached, prompt),
        ideal_kv_hit=_share(ideal, prompt),
        lost_reuse=_share(lost, ideal),
        ttft=Spread.of([outcome.ttft for outcome in finished]),
        e2e=Spread.of([outcome.e2e for outcome in finished]),
        queue=Spread.of([outcome.timings.queue for outcome in finished]),
        fetch=_fetch(finished, measured.before, measured.after),
        exact=measured.exact,
        role_changes=tuple(
            {key: change.get(key) for key in ROLE_CHANGE_KEYS}
            for change in measured.after.get("role_changes", ())[earlier:]
        ),
        nodes=nodes,
        seed=seed,
        command=command,
        seconds=measured.seconds,
        failures=tuple(f"{item.request}: {item.status} {item.error}" for item in failures),
        problems=(*measured.problems, *_miscounted(finished)),
    )


def _miscounted(finished: Sequence[Outcome]) -> list[str]:
    return [
        f"{item.request}: expected 0 to {len(item.prompt)} cached tokens, got {item.cached_tokens}"
        for item in finished
        if not 0 <= item.cached_tokens <= len(item.prompt)
    ]


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _fetch(finished: Sequence[Outcome], before: Json, after: Json) -> FetchSummary:
    fetching = [outcome.timings for outcome in finished if outcome.timings.fetch > 0]
    fetches = [timings.fetch for timings in fetching]
    exposed = sum(timings.exposed for timings in fetching)
    prefetched = _grown(before.get("prefetch", {}), after.get("prefetch", {}))
    waited = sum(fetches)
    copying = waited + prefetched("seconds")
    spread = Spread.of(fetches)
    return FetchSummary(
        count=len(fetching),
        mean=spread.mean,
        p95=spread.p95,
        hidden_share=1.0 - exposed / copying if copying else None,
        waiting_hidden_share=1.0 - exposed / waited if waited else None,
        exposed_mean=_share(exposed, len(fetching)),
        prefetch_count=prefetched("count"),
        prefetch_seconds=prefetched("seconds"),
    )


def _nodes(before: Json, after: Json) -> tuple[Json, ...]:
    earlier = {node["name"]: node for node in before.get("nodes", ())}
    rows = []
    for node in after.get("nodes", ()):
        grown = _grown(earlier.get(node["name"], {}), node)
        counts = {key: grown(key) for key in NODE_KEYS}
        rows.append({"name": node["name"], "role": node["role"], **counts})
    return tuple(rows)


def _grown(before: Json, after: Json) -> Callable[[str], Any]:
    """By how much a counter grew. A process that restarted began again at 0."""

    def growth(key: str) -> Any:
        old, new = before.get(key) or 0, after.get(key) or 0
        return new - old if new >= old else new

    return growth
