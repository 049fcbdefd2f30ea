"""Documents name paths and verbs that exist, and the Chinese README shows the commands and figures of the English one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from services.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
README, CHINESE = "README.md", "README.zh.md"
DOCUMENTS = [
    README,
    CHINESE,
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs/algorithms.md",
    "docs/architecture.md",
    "docs/ascend.md",
    "docs/gpu.md",
    "docs/judges.md",
    "docs/performance.md",
    "docs/python.md",
    "docs/rewards.md",
    "docs/verifiers.md",
]
PATH = re.compile(
    r"(?<![\w/.])((?:services|tests|docs|deploy|examples|benchmarks|proto|millrace(?=/\w+\.py))(?:/[\w.-]+)*/?)"
)
DRAWN = re.compile(r"(?<![\w/.])((?:gateway|learner|rollout|reward|environment|common|cli)(?:/\w+)+\.py)")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_paths_that_a_document_names_exist(document: str) -> None:
    text = (ROOT / document).read_text()
    named = {match.rstrip(".") for match in PATH.findall(text)} | {f"services/{match}" for match in DRAWN.findall(text)}
    assert not sorted(path for path in named if not (ROOT / path).exists())


@pytest.mark.parametrize("document", DOCUMENTS)
def test_verbs_that_a_document_names_exist(document: str) -> None:
    verbs = set(re.findall(r"(?:`|^)make ([a-z-]+)", (ROOT / document).read_text(), re.MULTILINE))
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert verbs <= known


def commands(document: str) -> list[str]:
    """The lines of its code blocks that are commands, without their comments."""
    blocks = re.findall(r"^```\n(.*?)^```", (ROOT / document).read_text(), re.MULTILINE | re.DOTALL)
    lines = (line.partition("  #")[0].strip() for block in blocks for line in block.splitlines())
    return [line for line in lines if re.match(r"(\.venv/|make |docker |curl |--data|MILLRACE_)", line)]


@pytest.mark.parametrize("document", [README, CHINESE])
def test_job_files_and_commands_that_a_readme_shows_exist(document: str) -> None:
    shown = commands(document)
    assert {"make demo", "make test", "make up"} <= set(shown)
    known = {command.__name__ for command in COMMANDS}
    assert {match for line in shown for match in re.findall(r"bin/millrace ([a-z]+)", line)} <= known
    assert all((ROOT / path).exists() for line in shown for path in re.findall(r"deploy/config/jobs/[\w.-]+", line))


def test_the_chinese_readme_shows_commands_and_figures_of_the_english_one() -> None:
    assert set(commands(CHINESE)) <= set(commands(README))
    english, chinese = (set(re.findall(r"\d+(?:\.\d+)*", (ROOT / each).read_text())) for each in (README, CHINESE))
    assert chinese <= english


@pytest.mark.parametrize("document", [README, CHINESE])
def test_documents_that_a_readme_links_to_exist(document: str) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / document).read_text())
    assert not [link for link in links if "://" not in link and not (ROOT / link).exists()]
