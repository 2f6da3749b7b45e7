"""Importing the package or asking for help loads nothing heavy."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "asyncio", "aiohttp", "numpy")


def loaded_after(code: str) -> set[str]:
    """Which of the heavy modules a fresh interpreter has loaded after ``code``."""
    script = f"import sys\n{code}\nprint(*[m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    return set(done.stdout.split()[-len(HEAVY) :]) & set(HEAVY)


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert loaded_after("import evolving_infra") == set()


def test_help_loads_nothing_heavy() -> None:
    code = (
        "from evolving_infra.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as stop:\n    assert stop.code == 0"
    )
    assert loaded_after(code) == set()


@pytest.mark.parametrize("part", ["control.plane", "traces.load"])
def test_pure_parts_load_no_torch(part: str) -> None:
    assert not loaded_after(f"import evolving_infra.{part}") & {"torch", "asyncio", "aiohttp"}


def test_the_store_process_loads_no_torch() -> None:
    assert "torch" not in loaded_after("import evolving_infra.cluster.store_process")
