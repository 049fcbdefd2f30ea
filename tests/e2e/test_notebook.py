"""The notebook of examples/notebook on a live stack: its code cells in order, in one namespace."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import MODEL, ROOT, Stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # it trains two jobs; the stack and the model are made before

FOLDER = ROOT / "examples/notebook"
STEPS = 6


def run_notebook(path: Path, parameters: dict[str, Any]) -> dict[str, Any]:
    """The names that its cells leave; `parameters` replace those of the cell with that tag."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{path.name}:{cell['id']}", "exec"), names)  # noqa: S102  our own
            if "parameters" in cell["metadata"].get("tags", ()):
                assert parameters.keys() <= names.keys()
                names |= parameters
    return names


def test_the_notebook_runs_from_its_first_cell_to_its_last(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(MODEL, stack.home / "models" / "tiny")  # the name in the demo's job
    monkeypatch.chdir(FOLDER)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    left = run_notebook(FOLDER / "first_job.ipynb", {"HOME": stack.home, "STEPS": STEPS, "EVAL_TASKS": 16})
    job, again = left["job"], left["again"]
    assert (job.state, again.state) == ("succeeded", "succeeded")
    assert left["metrics"].index.tolist() == list(range(1, STEPS + 1))
    assert left["evaluations"].index.tolist()[0] == 0
    assert left["comparison"].index.tolist() == [job.id, again.id]
    assert left["comparison"]["learner.lr"].tolist() == [6e-4, 3e-4]
    assert len(left["samples"]) > 0
    assert isinstance(left["answer"], str)
    assert f"{STEPS}/{STEPS}" in capsys.readouterr().err
