"""Ledger and lineages in a job's folder, for use while its ranks do not run. Imports neither torch nor Redis."""

from __future__ import annotations

from pathlib import Path

from services.common.checkpoints.manifest import CHECKPOINTS_DIR, newest_manifest
from services.common.jobs.fates import Fate
from services.common.jobs.folder import HISTORY_FILE
from services.common.jobs.history_mark import HistoryReader
from services.learner.groups.ledger import Ledger
from services.learner.storage.folder import JOURNAL_DIR
from services.learner.storage.journal import BatchRecord, Journal, JournalError
from services.learner.storage.journal_key import JournalKey
from services.learner.storage.lineage import FIRST, LineageError, Rise, read_rises


def ledger_on_disk(folder: Path) -> tuple[int, Ledger]:
    """The last step and the ledger of a job whose ranks do not run, from its newest manifest and its journal; changes nothing.

    Raises:
        JournalError: the journal is damaged.
    """
    checkpoint = newest_manifest(folder / CHECKPOINTS_DIR)
    step, ledger = 0, Ledger()
    if checkpoint is not None:
        step, ledger = checkpoint.step, Ledger.restore(checkpoint.state["ledger"])
    for record in Journal(folder / JOURNAL_DIR).records(after_step=None if checkpoint is None else step):
        ledger.replay(record.issued, [*record.settled])
        step = max(step, record.step)
    return step, ledger


def close_ledger(folder: Path, issued: int, reason: str, key: JournalKey | None = None) -> dict[str, int]:
    """Gives every group of a job that failed without its head the fate `cancelled`, in the journal; returns the number of each fate.

    `issued`: the least number of ordinals issued, from other sources; `key`: the journal's, where it has one.

    Raises:
        JournalError: the journal is damaged.
        OSError: it cannot be written.
    """
    step, ledger = ledger_on_disk(folder)
    ledger.reissue(issued, policy_version=step)
    for group_id in list(ledger.active):
        ledger.settle(group_id, Fate.CANCELLED, reason)
    settled = tuple(ledger.take_unwritten())
    if settled:
        lineage = lineages_on_disk(folder)[-1].lineage
        mark = HistoryReader(folder / HISTORY_FILE).mark()
        record = BatchRecord(step, lineage, (), settled, ledger.issued, history=mark)
        Journal(folder / JOURNAL_DIR, key).append(record)
    return ledger.summary()


def lineages_on_disk(folder: Path) -> list[Rise]:
    """The lineages so far; where their file is damaged, one: the highest in a manifest or a record."""
    try:
        return read_rises(folder)
    except LineageError:
        checkpoint = newest_manifest(folder / CHECKPOINTS_DIR)
        highest = FIRST.lineage if checkpoint is None else int(checkpoint.state["lineage"])
        try:
            for record in Journal(folder / JOURNAL_DIR).records():
                highest = max(highest, record.lineage)
        except JournalError:
            pass  # the records after the damage belong to no lineage any more
        return [Rise(highest, 0, "the file that knew was damaged", 0.0)]
