"""A replay report for people."""

from rich.console import Console
from rich.table import Table

from evolving_infra.replay.report import ReplayReport, Spread

SHOWN_SENTENCES = 10
"""Failures and problems shown in full; of the rest only the number."""


def print_report(report: ReplayReport, console: Console) -> None:
    """Print all tables, then the verdict."""
    tables = (_work(report), _reuse(report), _times(report), _fetches(report), _nodes(report))
    for table in tables:
        console.print(table)
    if report.role_changes:
        console.print(_role_changes(report))
    _sentences(console, "failed requests", report.failures)
    _sentences(console, "inexact requests", report.exact.inexact)
    _sentences(console, "problems", report.problems)
    exact = report.exact
    same = exact.checked - len(exact.inexact)
    console.print(f"exact: {same} of {exact.checked} recomputed requests have identical tokens")
    console.print("ok" if report.ok else "NOT OK", style="bold green" if report.ok else "bold red")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table


def _work(report: ReplayReport) -> Table:
    table = _table("requests", "", "count")
    tokens = report.tokens
    rows = {
        "requests": report.requests,
        "failed": report.failed,
        "prompt tokens": tokens.prompt,
        "  cached": tokens.cached,
        "  recomputed": tokens.recomputed,
        "output tokens": tokens.output,
    }
    for name, count in rows.items():
        table.add_row(name, f"{count:,}")
    table.add_row("seconds", f"{report.seconds:.1f}")
    return table


def _reuse(report: ReplayReport) -> Table:
    table = _table("KV reuse", "", "share")
    table.add_row("KV hit", _percent(report.kv_hit))
    table.add_row("ideal KV hit", _percent(report.ideal_kv_hit))
    table.add_row("lost reuse", _percent(report.lost_reuse))
    return table


def _times(report: ReplayReport) -> Table:
    table = _table("time of a request, ms", "", "mean", "P50", "P95")
    spreads = {"TTFT": report.ttft, "E2E": report.e2e, "queue": report.queue}
    for name, spread in spreads.items():
        table.add_row(name, *_milliseconds(spread))
    return table


def _fetches(report: ReplayReport) -> Table:
    fetch = report.fetch
    table = _table("KV fetches", "", "")
    table.add_row("requests that fetched", f"{fetch.count:,}")
    table.add_row("mean, ms", f"{fetch.mean * 1000:.1f}")
    table.add_row("P95, ms", f"{fetch.p95 * 1000:.1f}")
    table.add_row("exposed mean, ms", f"{fetch.exposed_mean * 1000:.1f}")
    hidden = "-" if fetch.hidden_share is None else _percent(fetch.hidden_share)
    table.add_row("hidden share", hidden)
    return table


def _nodes(report: ReplayReport) -> Table:
    table = _table("nodes", "node", "role", "prefill tokens", "decode tokens", "fetched", "evicted")
    for node in report.nodes:
        counts = ("prefill_tokens", "decode_tokens", "fetched_blocks", "evicted_blocks")
        table.add_row(node["name"], node["role"], *(f"{node[key]:,}" for key in counts))
    return table


def _role_changes(report: ReplayReport) -> Table:
    columns = ("node", "from", "to", "control ms", "drain s", "blocks lost", "failed")
    table = _table("role changes", *columns)
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


def _milliseconds(spread: Spread) -> tuple[str, ...]:
    return tuple(f"{value * 1000:.1f}" for value in (spread.mean, spread.p50, spread.p95))
