"""The layers of design section 3, read from the imports in the syntax trees."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "evolving_infra"

BASE = {"types", "errors", "env", "config"}
OPS = BASE | {"ops", "_core", "kernels"}
PARTS = {"engine", "kv", "control"}
MAY_IMPORT = {
    "types": set(),
    "errors": set(),
    "env": {"errors"},
    "config": {"errors", "types"},
    "kernels": set(),
    "ops": OPS,
    "control": BASE | {"control", "_core"},
    "engine": OPS | {"engine"},
    "kv": OPS | {"kv"},
    "traces": BASE | {"traces"},
    "cluster": OPS | PARTS | {"cluster"},
    "gateway": BASE | {"cluster", "gateway"},
    "replay": BASE | {"cluster", "traces", "replay"},
    "cli": BASE | {"cluster", "traces", "replay"},
}
FORBIDDEN_IN_CONTROL = {
    *("asyncio", "datetime", "multiprocessing", "os", "random", "secrets", "socket"),
    *("subprocess", "threading", "time", "torch", "uuid"),
}


def imports(tree: ast.AST) -> set[str]:
    """Absolute dotted names that a module imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not used in this package"
            names.add(node.module or "")
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def violations(package: Path) -> list[str]:
    """One line per import that points up, sideways or out of purity."""
    found = []
    for path in sorted(package.rglob("*.py")):
        place = path.relative_to(package).with_suffix("").parts
        layer = place[0]
        if layer == "__init__":
            continue
        for name in sorted(imports(ast.parse(path.read_text()))):
            parts = name.split(".")
            if parts[0] == "evolving_infra":
                if len(parts) > 1 and parts[1] not in MAY_IMPORT[layer] | {"__version__"}:
                    found.append(f"{'/'.join(place)}: {layer} must not import {name}")
            elif layer == "control" and parts[0] in FORBIDDEN_IN_CONTROL:
                found.append(f"{'/'.join(place)}: control must not import {name}")
    return found


def test_no_import_points_up() -> None:
    assert violations(PACKAGE) == []


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("control/planted.py", "import time"),
        ("control/planted.py", "from evolving_infra.kv import layout"),
        ("control/planted.py", "def f():\n    import torch.nn"),
        ("kv/planted.py", "from evolving_infra import control"),
        ("cluster/planted.py", "import evolving_infra.gateway.app"),
        ("types.py", "from evolving_infra.errors import wrong"),
    ],
)
def test_a_planted_violation_is_found(tmp_path: Path, file: str, line: str) -> None:
    planted = tmp_path / file
    planted.parent.mkdir(parents=True, exist_ok=True)
    planted.write_text(line + "\n")
    assert len(violations(tmp_path)) >= 1


def test_every_part_has_a_layer() -> None:
    parts = {p.stem for p in PACKAGE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert parts - {"__init__"} <= set(MAY_IMPORT)
