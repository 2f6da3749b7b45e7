"""A replay report for people."""

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from evolving_infra.replay.report import ReplayReport, Spread

SHOWN_SENTENCES = 10
"""Failures and problems shown in full; of the rest only the number."""


def print_report(report: ReplayReport, console: Console) -> None:
    """Print the figures, then the verdict."""
    for figures in (_summary(report), _times(report), _nodes(report)):
        console.print(figures)
    if report.role_changes:
        console.print(_role_changes(report))
    _sentences(console, "failed requests", report.failures)
    _sentences(console, "inexact requests", report.exact.inexact)
    _sentences(console, "problems", report.problems)
    exact = report.exact
    same = exact.checked - len(exact.inexact)
    console.print(f"exact: {same} of {exact.checked} recomputed requests have identical tokens")
    console.print("ok" if report.ok else "NOT OK", style="bold green" if report.ok else "bold red")


def _table(*columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table


def _summary(report: ReplayReport) -> Table:
    tokens, fetch = report.tokens, report.fetch
    again = f", {tokens.recomputed_again:,} computed again" if tokens.recomputed_again else ""
    rows = {
        "requests": f"{report.requests:,} in {report.seconds:.1f} s, {report.failed:,} failed",
        "tokens": (
            f"{tokens.prompt:,} prompt = {tokens.cached:,} cached "
            f"+ {tokens.recomputed:,} recomputed{again}; {tokens.output:,} output"
        ),
        "KV reuse": (
            f"hit {_percent(report.kv_hit)}, ideal {_percent(report.ideal_kv_hit)}, "
            f"lost {_percent(report.lost_reuse)}"
        ),
        "KV fetched": (
            f"{fetch.count:,} by waiting requests: mean {fetch.mean * 1000:.1f} ms, "
            f"P95 {fetch.p95 * 1000:.1f} ms, exposed mean {fetch.exposed_mean * 1000:.1f} ms"
        ),
        "KV prefetched": (
            f"{fetch.prefetch_count:,} ahead of requests, {fetch.prefetch_seconds:.2f} s in all"
        ),
        "hidden": (
            f"{_share(fetch.hidden_share)} of all KV read from peers; "
            f"{_share(fetch.waiting_hidden_share)} of what waiting requests read"
        ),
    }
    grid = Table.grid(padding=(0, 2))
    for name, text in rows.items():
        grid.add_row(name, text)
    return grid


def _times(report: ReplayReport) -> Table:
    table = _table("ms", "mean", "P50", "P95")
    spreads = {"TTFT": report.ttft, "E2E": report.e2e, "queue": report.queue}
    for name, spread in spreads.items():
        table.add_row(name, *_milliseconds(spread))
    return table


def _nodes(report: ReplayReport) -> Table:
    table = _table("node", "role", "prefill tokens", "decode tokens", "fetched", "evicted")
    for node in report.nodes:
        counts = ("prefill_tokens", "decode_tokens", "fetched_blocks", "evicted_blocks")
        table.add_row(node["name"], node["role"], *(f"{node[key]:,}" for key in counts))
    return table


def _role_changes(report: ReplayReport) -> Table:
    columns = ("role change", "from", "to", "control ms", "drain s", "blocks lost", "failed")
    table = _table(*columns)
    for change in report.role_changes:
        drain = change["drain_s"]
        table.add_row(
            change["node"],
            change["from"],
            change["to"],
            f"{change['control_s'] * 1000:.1f}",
            "draining" if drain is None else f"{drain:.2f}",
            str(change["blocks_lost"]),
            str(change["failed_requests"]),
        )
    return table


def _sentences(console: Console, title: str, sentences: tuple[str, ...]) -> None:
    if not sentences:
        return
    console.print(f"{title}: {len(sentences)}", style="bold red")
    for sentence in sentences[:SHOWN_SENTENCES]:
        console.print(f"  {sentence}", markup=False, highlight=False, soft_wrap=True)
    if len(sentences) > SHOWN_SENTENCES:
        console.print(f"  and {len(sentences) - SHOWN_SENTENCES} more")


def _percent(share: float) -> str:
    return f"{share * 100:.2f} %"


def _share(share: float | None) -> str:
    """``-`` where there was nothing to have a share of."""
    return "-" if share is None else _percent(share)


def _milliseconds(spread: Spread) -> tuple[str, ...]:
    return tuple(f"{value * 1000:.1f}" for value in (spread.mean, spread.p50, spread.p95))
