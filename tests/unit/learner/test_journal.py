"""What the journal returned from writing is there after any crash, and damage is never read as data."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.learner import journal as module
from services.learner.journal import BatchRecord, Journal, JournalError
from services.learner.ledger import Fate, Settled


def record(step: int) -> BatchRecord:
    groups = tuple(bytes([step, i]) * 50 for i in range(3))
    return BatchRecord(
        step, 1, groups, (Settled(step, Fate.TRAINED), Settled(step + 100, Fate.FAILED, "why")), issued=step + 101
    )


def test_records_come_back_as_they_were_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for step in range(1, 6):
        journal.append(record(step))
    assert list(Journal(tmp_path).records()) == [record(step) for step in range(1, 6)]
    assert list(Journal(tmp_path).records(after_step=3)) == [record(4), record(5)]


def test_a_new_segment_continues_the_same_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEGMENT_BYTES", 100)
    journal = Journal(tmp_path)
    for step in range(1, 5):
        journal.append(record(step))
    assert len(list(tmp_path.glob("*.wal"))) > 1
    assert [r.step for r in Journal(tmp_path).records()] == [1, 2, 3, 4]


def test_a_torn_tail_of_any_length_costs_only_the_record_that_was_never_finished(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append(record(1))
    segment = next(tmp_path.glob("*.wal"))
    whole = segment.stat().st_size
    journal.append(record(2))
    data = segment.read_bytes()
    for length in range(whole, len(data)):
        segment.write_bytes(data[:length])
        assert [r.step for r in Journal(tmp_path).records()] == [1]
        again = Journal(tmp_path)
        again.append(record(2))
        assert [r.step for r in again.records()] == [1, 2]


def test_any_flipped_byte_is_detected(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for step in (1, 2):
        journal.append(record(step))
    segment = next(tmp_path.glob("*.wal"))
    data = segment.read_bytes()
    for position in range(len(data)):
        segment.write_bytes(data[:position] + bytes([data[position] ^ 0x40]) + data[position + 1 :])
        with pytest.raises(JournalError, match=segment.name):
            list(Journal(tmp_path).records())


def test_a_missing_step_is_an_error(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append(record(1))
    journal.append(record(3))
    with pytest.raises(JournalError, match="step 3 follows step 1"):
        list(Journal(tmp_path).records())
