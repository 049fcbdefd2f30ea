"""Who may import whom: `common` is a leaf, services do not import one another, and nobody unpickles."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SERVICES = ROOT / "services"
SIBLINGS = {"gateway", "rollout", "reward", "learner"}
HEAVY = {"torch", "vllm", "fastapi", "megatron", "mbridge", "transformers"}
TRIAL = SERVICES / "common/model_trial.py"
"""Loads tokenizers, within its functions; transformers does that without torch."""


def imports(path: Path) -> set[str]:
    """Dotted names of every module that a file imports, wherever the import stands."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def sources(folder: str) -> list[Path]:
    return [path for path in sorted((SERVICES / folder).rglob("*.py")) if "pb" not in path.parts]


@pytest.mark.parametrize("path", sources("common"), ids=lambda path: str(path.relative_to(SERVICES)))
def test_common_is_a_leaf(path: Path) -> None:
    heavy = HEAVY - {"transformers"} if path == TRIAL else HEAVY
    for name in imports(path):
        parts = name.split(".")
        assert parts[0] not in heavy, f"{path} imports {name}"
        assert parts[0] != "services" or parts[1] == "common", f"{path} imports {name}"


@pytest.mark.parametrize("service", sorted(SIBLINGS))
def test_a_service_imports_no_other_service(service: str) -> None:
    for path in sources(service):
        for name in imports(path):
            parts = name.split(".")
            foreign = parts[0] == "services" and parts[1] not in {"common", service}
            assert not foreign, f"{path} imports {name}"


@pytest.mark.parametrize("folder", ["common", *sorted(SIBLINGS), "cli", "demo"])
def test_nobody_unpickles(folder: str) -> None:
    for path in sources(folder):
        assert not imports(path) & {"pickle", "cloudpickle", "dill", "shelve", "marshal"}, f"{path} imports a pickle"


@pytest.mark.parametrize("service", ["gateway", "reward", "cli"])
def test_a_light_service_imports_no_engine(service: str) -> None:
    for path in sources(service):
        for name in imports(path):
            assert name.split(".")[0] not in {"torch", "vllm", "megatron"}, f"{path} imports {name}"
