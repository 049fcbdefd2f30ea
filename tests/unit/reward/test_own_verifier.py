"""The package that docs/verifiers.md shows: installed as it is, its test passes, and the pool judges with it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from services.common.streams.types import VerdictStatus
from services.reward.pool.pool import Pool
from tests.unit.reward.conftest import check

DOCUMENT = Path(__file__).parents[3] / "docs/verifiers.md"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for name, content in re.findall(
        r"^`([\w.]+)`\n\n```\w+\n(.*?)^```", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL
    ):
        (tmp_path / name).write_text(content)
    return tmp_path


def test_the_package_is_whole_and_its_own_test_passes(package: Path) -> None:
    assert {path.name for path in package.iterdir()} == {"pyproject.toml", "word_count.py", "test_word_count.py"}
    subprocess.run([sys.executable, "test_word_count.py"], check=True, cwd=package)


@pytest.fixture
def site(package: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory in which the package is installed."""
    target = str(tmp_path_factory.mktemp("site"))
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*install, "--target", target, str(package)], check=True, capture_output=True)
    return target


async def test_the_pool_judges_with_the_installed_package(site: str) -> None:
    path = os.pathsep.join(filter(None, (site, os.environ.get("PYTHONPATH"))))
    async with Pool(1, environment={"PYTHONPATH": path}) as pool:
        right, wrong = await pool.judge([check("word_count", "one two", "2"), check("word_count", "one", "2")])
    assert (right.status, right.reward, right.accuracy) == (VerdictStatus.SCORED, 1.0, 1.0)
    assert (wrong.status, wrong.reward) == (VerdictStatus.SCORED, 0.5)
