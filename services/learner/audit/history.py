"""History audit: checks a job's own history against its journal, for missing steps and for lines that were cut off or rewritten."""

from __future__ import annotations

from pathlib import Path

from services.common.jobs.folder import HISTORY_FILE, JOB_FILE, History, JobFolder
from services.common.jobs.history_mark import HistoryReader
from services.learner.audit.audit import Audit
from services.learner.audit.report import Breach
from services.learner.storage.journal import BatchRecord

UNDER_WAY = 1
"""Steps in the journal and not yet in the history: the one in training, now or when the job ended."""


class HistoryAudit:
    """The history at the time when the newest record was of step `journalled`, or later."""

    def __init__(self, folder: Path, journalled: int, *, complete: bool) -> None:
        """Reads it. `complete`: the job has succeeded, so that no step is in training, nor was when it ended."""
        self._folder = folder
        self._last_required = journalled if complete else journalled - UNDER_WAY
        self._reader = HistoryReader(folder / HISTORY_FILE)
        self._marked: set[int] = set()
        """Steps whose records have a mark of the history."""
        self._broken = False
        """Whether it no longer agrees with a record's mark."""
        self._history, self._fault = self._read()
        self._manifests: dict[int, set[str]] = {}

    def read_manifests(self) -> None:
        """Reads the history's checkpoint lines, after the checkpoints were read: each line is older than its checkpoint."""
        self._manifests = self._read()[0].manifests

    def check_manifest(self, step: int, where: str, digest: str, audit: Audit) -> None:
        """Checks that the history has this checkpoint, unless an earlier release wrote it; to be called after all records."""
        known = self._manifests.get(step)
        if known is None and step in self._marked:
            audit.breach(Breach.CHECKPOINT, where, "the history does not tell of it: that was cut, or this put there")
        elif known is None:
            audit.report.unproved.append(f"{where}: the history does not tell of it, and so not which files it had")
        elif digest not in known:
            message = "its manifest is not one that the history tells of: it was written anew, with other files perhaps"
            audit.breach(Breach.CHECKPOINT, where, message)

    def check_mark(self, where: str, record: BatchRecord, audit: Audit) -> None:
        """Checks that the history still begins as it did when the record was written."""
        if record.history is None:
            return
        if record.groups:
            self._marked.add(record.step)
        if self._broken:
            return
        size, trouble = record.history.bytes, "cut or rewritten"
        try:
            self._broken = size > 0 and not self._reader.holds(record.history)
        except OSError as error:
            self._broken, trouble = True, f"taken away: {error.strerror}"
        if self._broken:
            message = f"it had {size} bytes by {where}, and does not begin with them any more: it was {trouble}"
            audit.breach(Breach.HISTORY, HISTORY_FILE, message)

    def check_steps(self, audit: Audit) -> None:
        """Compares each step with the journal, after all of the journal's records."""
        required = [step for step in audit.steps_journalled if step <= self._last_required]
        if self._fault is not None:
            if (self._folder / JOB_FILE).exists() and required and not self._broken:
                audit.breach(Breach.HISTORY, HISTORY_FILE, self._fault)
            elif not self._broken and audit.steps_journalled:
                audit.report.remarks.append(f"{HISTORY_FILE}: {self._fault}: nothing was compared with it")
            return
        steps = self._history.steps
        audit.history(HISTORY_FILE, steps)
        present = {step.get("step") for step in steps}
        missing = [step for step in required if step not in present]
        if missing:
            named = f"{missing[0]}" if len(missing) == 1 else f"{missing[0]} and {len(missing) - 1} more"
            audit.breach(Breach.HISTORY, HISTORY_FILE, f"step {named}: journalled, and not told: the history was cut")
        audit.report.remarks += [
            f"{HISTORY_FILE}: line {number} cannot be read: a crash left it, or it is damaged"
            for number in self._history.unreadable
        ]
        undigested = sum("record_digest" not in step for step in steps)
        if undigested:
            audit.report.unproved.append(
                f"batches of {undigested} steps, told by a release that noted no digests of its records: their verdicts"
            )

    def _read(self) -> tuple[History, str | None]:
        try:
            if not (self._folder / HISTORY_FILE).exists():
                return History(), "it is not there"
            return JobFolder(self._folder).history(), None
        except OSError as error:
            return History(), f"cannot be read: {error.strerror}"
