"""Documents for developers name paths that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs/algorithms.md",
    "docs/architecture.md",
    "docs/judges.md",
    "docs/performance.md",
    "docs/rewards.md",
]
PATH = re.compile(r"(?<![\w/.])((?:services|tests|docs|deploy|examples|benchmarks|proto)(?:/[\w.-]+)*/?)")
DRAWN = re.compile(r"(?<![\w/.])((?:gateway|learner|rollout|reward|common|cli)(?:/\w+)+\.py)")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_paths_that_a_document_names_exist(document: str) -> None:
    text = (ROOT / document).read_text()
    named = {match.rstrip(".") for match in PATH.findall(text)} | {f"services/{match}" for match in DRAWN.findall(text)}
    assert not sorted(path for path in named if not (ROOT / path).exists())


@pytest.mark.parametrize("document", DOCUMENTS)
def test_verbs_that_a_document_names_exist(document: str) -> None:
    verbs = set(re.findall(r"`?make ([a-z-]+)", (ROOT / document).read_text()))
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert verbs <= known
