"""Fate log: `fates.jsonl` (see `services.common.jobs.fates`) beside the journal, written from its records."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from services.common.jobs.fates import FateLine, collect, read_lines
from services.learner.storage.journal import BatchRecord, JournalError

log = logging.getLogger(__name__)


class FateLog:
    """One line per record. After a crash, the first record corrects missing or surplus lines from the journal."""

    def __init__(self, path: Path, journal: Callable[[], Iterable[BatchRecord]]) -> None:
        """`journal` returns all of its records."""
        self._path, self._journal = path, journal
        self._step: int | None = None
        """Step of the last line; None before the file is read."""

    def append(self, record: BatchRecord) -> None:
        """Adds a record that the journal has. A failed write does not fail the job: the next record tries again."""
        try:
            if self._step is None:
                self._step = self._last_step()
            if self._step == record.base_version:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(_line(record))
            else:
                self._rewrite()
            self._step = record.step
        except (OSError, JournalError) as error:
            log.warning("%s cannot be written: %s", self._path, error)
            self._step = None

    def _last_step(self) -> int:
        """0 without a line; -1, which no step follows, for a file that cannot be continued."""
        try:
            if self._path.exists() and not self._path.read_bytes().endswith(b"\n"):
                return -1
            steps = [line.step for line in read_lines(self._path)]
        except FileNotFoundError:
            return 0
        except (ValueError, KeyError, TypeError):
            return -1
        return steps[-1] if steps else 0

    def _rewrite(self) -> None:
        draft = self._path.with_suffix(".tmp")
        with draft.open("w", encoding="utf-8") as file:
            file.writelines(_line(record) for record in self._journal())
        draft.replace(self._path)


def _line(record: BatchRecord) -> str:
    settled = ((item.group_id, item.fate, item.reason) for item in record.settled)
    return FateLine(record.step, record.lineage, record.issued, collect(settled)).dump()
