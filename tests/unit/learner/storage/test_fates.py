"""The list of fates is the journal's, whatever a crash left of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.common.jobs.fates import FATES_FILE, Fate, FateList, read_fates
from services.learner.storage.fates import FateLog
from services.learner.storage.journal import BatchRecord, Journal
from tests.unit.learner.journalled_job import STEPS, JournalledJob

SUMS = {Fate.TRAINED: 10, Fate.DEGENERATE: 5, Fate.FAILED: 5, Fate.CANCELLED: 1}


class Writer:
    """A learner's journal and list of fates, in a folder; made anew after each crash."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FATES_FILE
        self._journal = Journal(folder / "journal")
        self._journal.on_append = FateLog(self.path, self._journal.records).append

    def write(self, *records: BatchRecord) -> None:
        for record in records:
            self._journal.append(record)

    def read(self, fate: Fate | None = None, offset: int = 0, limit: int = 1000) -> FateList:
        return read_fates(self.path, fate=fate, offset=offset, limit=limit)


@pytest.fixture
def records() -> list[BatchRecord]:
    return JournalledJob().records


def test_the_list_has_every_fate_of_the_journal_with_step_and_reason(
    tmp_path: Path, records: list[BatchRecord]
) -> None:
    writer = Writer(tmp_path)
    writer.write(*records)
    found = writer.read()
    assert (found.fates, found.issued, found.active, found.step, found.lineage) == (SUMS, 4 * STEPS + 1, 0, STEPS, 1)
    assert found.failed_reasons == {"only 1 of 2 rollouts could be judged": 5}
    told = [(g.group_id, g.fate, g.reason, g.step) for g in found.page]
    assert told == [(s.group_id, s.fate, s.reason, r.step) for r in records for s in r.settled]


def test_pages_of_one_fate_put_together_are_the_whole(tmp_path: Path, records: list[BatchRecord]) -> None:
    writer = Writer(tmp_path)
    writer.write(*records)
    for fate in (None, *Fate):
        whole = writer.read(fate).page
        assert {g.fate for g in whole} <= {fate} or fate is None
        for size in (1, 3, 7):
            pages = [writer.read(fate, offset, size).page for offset in range(0, 30, size)]
            assert [g for page in pages for g in page] == whole


@pytest.mark.parametrize("left", ["nothing", "less", "torn", "damaged", "empty", "another journal's"])
def test_whatever_a_crash_left_the_next_record_puts_it_right(
    tmp_path: Path, records: list[BatchRecord], left: str
) -> None:
    writer = Writer(tmp_path)
    writer.write(*records[:3])
    lines = writer.path.read_text().splitlines(keepends=True)
    broken = {
        "nothing": None, "less": "".join(lines[:2]), "torn": "".join(lines)[:-9], "damaged": "{}\n" + lines[2][:-9],
        "empty": "", "another journal's": "".join(lines) + lines[2].replace('"step": 3', '"step": 9'),
    }[left]  # fmt: skip
    writer.path.unlink()
    if broken is not None:
        writer.path.write_text(broken)
    again = Writer(tmp_path)
    again.write(*records[3:])
    assert again.read().fates == SUMS
    assert [g.group_id for g in again.read().page] == [s.group_id for r in records for s in r.settled]


def test_a_half_written_line_is_not_read(tmp_path: Path, records: list[BatchRecord]) -> None:
    writer = Writer(tmp_path)
    writer.write(*records[:2])
    whole = writer.read()
    with writer.path.open("a") as file:
        file.write('{"step": 3, "lin')
    assert writer.read() == whole


def test_a_list_that_cannot_be_written_harms_nothing_and_is_made_up_for(
    tmp_path: Path, records: list[BatchRecord]
) -> None:
    writer = Writer(tmp_path)
    writer.write(records[0])
    writer.path.unlink()
    writer.path.mkdir()
    writer.write(records[1])
    writer.path.rmdir()
    writer.write(*records[2:])
    assert writer.read().fates == SUMS


def test_a_journal_that_cannot_be_read_back_does_not_end_the_job(tmp_path: Path, records: list[BatchRecord]) -> None:
    Writer(tmp_path).write(*records[:3])
    [segment] = (tmp_path / "journal").glob("*.wal")
    again = Writer(tmp_path)
    again.path.unlink()
    again.write(records[3])
    data = bytearray(segment.read_bytes())
    data[60] ^= 1
    segment.write_bytes(data)
    again.path.unlink()
    last = Writer(tmp_path)
    last._journal._segment = segment
    last.write(records[4])
    assert not last.path.exists()
