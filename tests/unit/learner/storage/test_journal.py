"""What the journal returned from writing is there after any crash, and damage is never read as data."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from services.common.errors import Fenced
from services.common.jobs.fates import Fate
from services.learner.groups.ledger import Settled
from services.learner.storage import journal as module
from services.learner.storage.journal import BatchRecord, Journal, JournalError


def record(step: int, lineage: int = 1) -> BatchRecord:
    groups = tuple(bytes([step, i]) * 50 for i in range(3))
    return BatchRecord(
        step, lineage, groups, (Settled(step, Fate.TRAINED), Settled(step + 100, Fate.FAILED, "why")), issued=step + 101
    )


def test_records_come_back_as_they_were_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for step in range(1, 6):
        journal.append(record(step))
    assert list(Journal(tmp_path).records()) == [record(step) for step in range(1, 6)]
    assert list(Journal(tmp_path).records(after_step=3)) == [record(4), record(5)]
    assert list(Journal(tmp_path).records(after_step=0)) == [record(step) for step in range(1, 6)]


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


def fates(step: int, lineage: int = 1) -> BatchRecord:
    return BatchRecord(step, lineage, (), (Settled(900 + step, Fate.CANCELLED, "the job cancelled"),), issued=2000)


def write(root: Path, *records: BatchRecord) -> Journal:
    journal = Journal(root)
    for item in records:
        journal.append(item)
    return journal


def test_a_record_of_fates_alone_follows_its_step_and_comes_with_it(tmp_path: Path) -> None:
    write(tmp_path, record(1), record(2), fates(2))
    journal = Journal(tmp_path)
    assert list(journal.records()) == [record(1), record(2), fates(2)]
    assert list(journal.records(after_step=1)) == [record(2), fates(2)]
    assert list(journal.records(after_step=2)) == [fates(2)], "it may have come after what was saved at step 2"
    journal.append(fates(3))
    with pytest.raises(JournalError, match="of step 3 follows step 2"):
        list(Journal(tmp_path).records())


def test_a_gap_is_sound_only_where_the_lineage_rises_and_the_checkpoint_covers_it(tmp_path: Path) -> None:
    journal = write(tmp_path, record(1), record(2), record(6, lineage=2), record(7, lineage=2))
    assert [r.step for r in journal.records()] == [1, 2, 6, 7]
    assert [r.step for r in journal.records(after_step=5)] == [6, 7]
    assert [r.step for r in journal.records(after_step=6)] == [7]
    for base in (2, 4):
        with pytest.raises(JournalError, match=f"step {base + 1} is missing"):
            list(journal.records(after_step=base))
    journal.append(record(8, lineage=1))
    with pytest.raises(JournalError, match="of step 8 follows step 7"):
        list(journal.records())


def test_segments_that_a_checkpoint_covers_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEGMENT_BYTES", 100)
    journal = write(tmp_path, *(record(step) for step in range(1, 6)))
    (tmp_path / "segment-0000000001.wal").write_bytes(b"damaged")
    assert [r.step for r in journal.records(after_step=3)] == [4, 5]
    with pytest.raises(JournalError, match="segment-0000000001"):
        list(journal.records(after_step=0))


def read_to_the_damage(journal: Journal) -> tuple[list[BatchRecord], JournalError]:
    read = []
    try:
        for item in journal.records():
            read.append(item)  # noqa: PERF402  what comes before the error counts
    except JournalError as error:
        return read, error
    pytest.fail("the damage was not detected")


def flips(data: bytes, count: int, seed: int) -> Iterator[bytes]:
    rng = random.Random(seed)
    for _ in range(count):
        position, bit = rng.randrange(len(data)), 1 << rng.randrange(8)
        yield data[:position] + bytes([data[position] ^ bit]) + data[position + 1 :]


def test_a_thousand_flipped_bits_are_each_detected_and_never_read_as_data(tmp_path: Path) -> None:
    kept = [record(step) for step in range(1, 9)]
    write(tmp_path, *kept)
    segment = next(tmp_path.glob("*.wal"))
    for damaged in flips(segment.read_bytes(), 1000, seed=11):
        segment.write_bytes(damaged)
        read, error = read_to_the_damage(Journal(tmp_path))
        assert error.segment == segment
        assert read == kept[: len(read)]


def test_damage_is_put_aside_with_all_that_follows_and_what_is_before_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SEGMENT_BYTES", 200)
    write(tmp_path, *(record(step) for step in range(1, 9)))
    segments = sorted(tmp_path.glob("*.wal"))
    assert len(segments) > 2
    before = {path.name: path.read_bytes() for path in segments}
    for number, damaged in enumerate(flips(before[segments[1].name], 40, seed=3), start=1):
        for name, data in before.items():
            (tmp_path / name).write_bytes(damaged if name == segments[1].name else data)
        journal = Journal(tmp_path)
        sound, error = read_to_the_damage(journal)
        aside = journal.cut(error)
        assert aside.name == f"damaged-{number}"
        kept = {path.name: path.read_bytes() for path in aside.iterdir()}
        assert kept.pop("reason.txt").decode().strip() == str(error)
        lost = kept.pop(segments[1].name)
        present = segments[1].read_bytes() if segments[1].exists() else b""
        assert present + lost == damaged, "nothing is deleted"
        assert kept == {path.name: before[path.name] for path in segments[2:]}
        assert list(Journal(tmp_path).records()) == sound
        assert 1 <= len(sound) < 8
        following = record(len(sound) + 1, lineage=2)
        journal.append(following)
        assert list(Journal(tmp_path).records()) == [*sound, following]


@pytest.mark.parametrize("failing", ["write", "fsync"])
def test_a_record_that_found_no_space_leaves_nothing_behind_and_may_be_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    journal = write(tmp_path, record(1))
    segment = next(tmp_path.glob("*.wal"))
    whole = segment.read_bytes()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    real = os.fsync
    calls = []

    def sync(handle: int) -> None:
        calls.append(handle)
        if len(calls) == 1:
            if failing == "write":
                os.ftruncate(handle, len(whole) + 7)  # what a disk that runs full leaves of a write
            full()
        real(handle)

    monkeypatch.setattr(os, "fsync", sync)
    with pytest.raises(OSError, match="No space left"):
        journal.append(record(2))
    assert segment.read_bytes() == whole
    journal.append(record(2))
    assert list(Journal(tmp_path).records()) == [record(1), record(2)]


def test_a_record_keeps_the_digest_of_the_weights_that_it_starts_from(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append(replace(record(1), weights_digest="ab" * 16))
    assert [r.weights_digest for r in Journal(tmp_path).records()] == ["ab" * 16]


def replaced() -> None:
    raise Fenced("a newer head writes")


def test_one_that_was_replaced_writes_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append(record(1))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    journal.guard = replaced
    with pytest.raises(Fenced):
        journal.append(record(2))
    with pytest.raises(Fenced):
        journal.cut(JournalError(next(tmp_path.glob("*.wal")), 0, "is damaged"))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_one_that_is_replaced_while_it_writes_tells_nobody_of_the_record(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    told: list[BatchRecord] = []
    journal.on_append = told.append
    answers = iter([None, None, Fenced("a newer head writes")])

    def guard() -> None:
        if (answer := next(answers)) is not None:
            raise answer

    journal.guard = guard
    with pytest.raises(Fenced):
        journal.append(record(1))
    assert [r.step for r in Journal(tmp_path).records()] == [1]
    assert not told
