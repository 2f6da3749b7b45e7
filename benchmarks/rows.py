"""One row of a benchmark, printed as a table and appended as JSON lines."""

import json
import platform
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """``ratio`` is us over ``peer``, above 1 is better for us; None in the peer's own row."""

    bench: str
    case: str
    subject: str
    metric: str
    value: float
    unit: str
    peer: str | None = None
    ratio: float | None = None


def machine() -> str:
    """Processor and core count of this machine."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    cores = len(Path("/proc/cpuinfo").read_text().split("\nprocessor")) if model else 0
    return f"{model}, {cores} cores"


def commit() -> str:
    """Short id of the checked-out commit, ``unknown`` outside a checkout."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
    )
    return done.stdout.strip() or "unknown"


def show(rows: list[Row], target: Path | None) -> None:
    """Print the rows; append them to ``target`` if given."""
    table = Table(title=f"{rows[0].bench}  ({machine()})")
    for column in ("case", "subject", "metric", "value", "unit", "ratio"):
        table.add_column(column, justify="right" if column in ("value", "ratio") else "left")
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}x {row.peer}"
        table.add_row(row.case, row.subject, row.metric, f"{row.value:,.4g}", row.unit, ratio)
    Console(width=120).print(table)
    if target is not None:
        with target.open("a") as file:
            for row in rows:
                more = {"machine": machine(), "commit": commit()}
                file.write(json.dumps({**asdict(row), **more}) + "\n")
