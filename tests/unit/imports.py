"""The project's modules, and what each of them imports, read from their sources."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


def modules(folder: Path) -> dict[str, Path]:
    """Dotted name → file."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = {path.name: modules(path) for path in sorted((ROOT / "services").iterdir()) if path.is_dir()}
MODULES["millrace"] = modules(ROOT / "millrace")
ALL = {name: path for service in MODULES.values() for name, path in service.items()}


@cache
def imports(path: Path, *, at_start: bool = False) -> frozenset[str]:
    """Dotted names of what a file imports, anywhere or `at_start` of the process; of a name in our module, that module's."""
    tree = ast.parse(path.read_text())
    names: set[str] = set()
    for node in tree.body if at_start else ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= (inner & ALL.keys()) or {node.module}
    return frozenset(names)
