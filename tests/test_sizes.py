"""Files of at most 400 lines, functions of at most 60: what a reader can hold in mind."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("evolving_infra", "csrc", "kernels", "benchmarks", "tests")
SUFFIXES = {".py", ".cpp", ".hpp", ".cu", ".cuh"}
FILES = sorted(
    path
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*")
    if path.suffix in SUFFIXES and "__pycache__" not in path.parts
)


def long_functions(source: str) -> list[str]:
    """Names of functions over 60 lines."""
    return [
        f"{node.name}: {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > 60
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_size(path: Path) -> None:
    source = path.read_text()
    assert len(source.splitlines()) <= 400
    if path.suffix == ".py":
        assert long_functions(source) == []


def test_a_long_function_is_found() -> None:
    assert long_functions("def long():\n" + "    pass\n" * 60) == ["long: 61 lines"]
