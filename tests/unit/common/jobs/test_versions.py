from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.common.jobs import versions
from services.common.jobs.versions import VERSIONS_FILE, record_versions


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / VERSIONS_FILE).read_text().splitlines()]


def test_a_start_on_the_same_versions_adds_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record_versions(tmp_path, "learner")
    record_versions(tmp_path, "learner")
    (first,) = lines(tmp_path)
    assert first["packages"]["pydantic"]
    assert first["python"].startswith("3.")
    monkeypatch.setattr(versions, "_git", lambda: "v9")
    record_versions(tmp_path, "learner")
    assert [line["git"] for line in lines(tmp_path)] == [first["git"], "v9"]


def test_a_folder_that_cannot_be_written_stops_no_job(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    record_versions(tmp_path / "gone", "learner")
    assert "cannot be written" in caplog.text
