from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tests.unit.gateway.trackers.histories import add_eval, add_step, follower, job_folder

pytest.importorskip("pyarrow")
pytest.importorskip("matplotlib")
from pyarrow import parquet


def test_the_folder_of_an_ended_job_has_tables_and_curves(tmp_path: Path) -> None:
    folder = job_folder(tmp_path)
    for step in range(1, 6):
        add_step(folder, step, **({"entropy": 1.0} if step > 2 else {}))
    folder.append("rewind", 4, {})
    add_eval(folder, 4)
    first = follower(folder.path, "files", None)
    first.advance("")
    assert not (folder.path / "curves.svg").exists()
    first.advance("succeeded")
    table = parquet.read_table(folder.path / "metrics.parquet").to_pydict()
    assert table["step"] == [1, 2, 3, 4]
    assert table["actor/entropy"] == [None, None, 1.0, 1.0]
    assert table["rollout/reward_mean"] == [0.1, 0.2, 0.3, 0.4]
    assert parquet.read_table(folder.path / "evals.parquet").to_pydict()["eval/pass_at_k"] == [0.5]
    root = ET.fromstring((folder.path / "curves.svg").read_text())  # noqa: S314  our own
    assert root.tag.endswith("svg")
    assert b"<script" not in (folder.path / "curves.svg").read_bytes()


def test_a_job_without_a_step_gets_no_empty_tables(tmp_path: Path) -> None:
    folder = job_folder(tmp_path)
    follower(folder.path, "files", None).advance("failed")
    assert not (folder.path / "metrics.parquet").exists()
