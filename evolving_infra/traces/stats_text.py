"""Trace statistics as lines for a person."""

from evolving_infra.traces.stats import TraceStats
from evolving_infra.traces.workload import Workload


def stats_text(workload: Workload, stats: TraceStats) -> str:
    """One paragraph, ending with what the importer inferred."""
    over = ", ".join(f"{count} over {limit} s" for limit, count in stats.waits_over)
    rows = [
        ("requests", f"{stats.requests:,} in {stats.recorded_seconds:,.0f} s"),
        ("tokens", f"{stats.input_tokens:,} in, {stats.output_tokens:,} out"),
        ("longest input", f"{stats.longest_input:,} tokens"),
        ("branches", f"{stats.branches:,} ({stats.forks} forks, {stats.subagents} sub-agents)"),
        ("rewrites", f"{stats.compactions} compactions, {stats.edits} small edits"),
        ("waits", f"p50 {stats.wait_p50:.1f} s, p90 {stats.wait_p90:.1f} s; {over}"),
        ("ideal hit rate", f"{stats.ideal_hit:.4f} in blocks of {workload.block_size} tokens"),
    ]
    rows += [("inferred", note) for note in workload.notes]
    return "\n".join([workload.name, *(f"  {name:<15} {text}" for name, text in rows)])
