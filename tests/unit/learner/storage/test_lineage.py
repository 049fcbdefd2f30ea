"""The lineage only rises, durably, and a damaged file is never read as a lineage."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.learner.storage.folder import LINEAGE_FILE
from services.learner.storage.lineage import FIRST, LineageError, raise_lineage, read_rises


def test_a_job_without_the_file_is_in_its_first_lineage(tmp_path: Path) -> None:
    assert read_rises(tmp_path) == [FIRST]


def test_every_rise_is_kept_with_its_reason_and_the_step_it_began_after(tmp_path: Path) -> None:
    second = raise_lineage(tmp_path, read_rises(tmp_path), 2, 7, "a damaged record")
    fourth = raise_lineage(tmp_path, read_rises(tmp_path), 4, 9, "a version beyond")
    assert read_rises(tmp_path) == [FIRST, second, fourth]
    assert (fourth.lineage, fourth.after_step, fourth.reason) == (4, 9, "a version beyond")
    with pytest.raises(ValueError, match="not above 4"):
        raise_lineage(tmp_path, read_rises(tmp_path), 4, 9, "again")


def test_every_flipped_byte_of_the_file_is_detected(tmp_path: Path) -> None:
    raise_lineage(tmp_path, read_rises(tmp_path), 2, 7, "a damaged record")
    path = tmp_path / LINEAGE_FILE
    data = path.read_bytes()
    for position in range(len(data)):
        path.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        with pytest.raises(LineageError, match=LINEAGE_FILE):
            read_rises(tmp_path)
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(LineageError, match=LINEAGE_FILE):
            read_rises(tmp_path)
