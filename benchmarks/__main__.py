"""Run one benchmark by name."""

import argparse
import importlib
from pathlib import Path

from benchmarks.rows import show

NAMES = {"eviction": "benchmarks.eviction"}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=sorted(NAMES))
    parser.add_argument("--json", type=Path, help="append the rows here, one JSON object a line")
    options = parser.parse_args()
    show(importlib.import_module(NAMES[options.name]).run(), options.json)


if __name__ == "__main__":
    main()
