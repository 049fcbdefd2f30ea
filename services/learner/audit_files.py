"""Reads a job's folder for the audit: spec, journal, checkpoints, and what the job said of itself."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from services.common.errors import ConfigError, MillraceError
from services.common.job_folder import HISTORY_FILE, SPEC_FILE, JobFolder
from services.common.job_records import JobState
from services.common.spec import JobSpec, parse_recorded_spec
from services.learner.audit import Audit
from services.learner.audit_report import AuditReport, Breach
from services.learner.checkpoint import Checkpoint
from services.learner.evidence import sound_checkpoints
from services.learner.folder import JOURNAL_DIR
from services.learner.journal import BatchRecord, Journal
from services.learner.lineage import Rise, read_rises

Steps = Iterable[Mapping[str, Any]]


def audit_job(
    folder: Path, *, told: Steps | None = None, told_state: str | None = None, job_id: str | None = None
) -> AuditReport:
    """Audits the job whose folder this is; reads only.

    Args:
        folder: `<home>/jobs/<job>`.
        told: the step records that the gateway tells, where it can be reached; the folder's own are read anyway.
        told_state: the state that the gateway tells; the folder's own counts where it has one.
        job_id: the job, where the folder has another name.

    Raises:
        ConfigError: there is no such job here, or its spec cannot be read.
    """
    spec = parse_recorded_spec(_read(folder / SPEC_FILE))
    checkpoints, remarks = sound_checkpoints(folder)
    states = {step: (f"checkpoints/{found.path.name}", found.state) for step, found in checkpoints.items()}
    audit = Audit(job_id or folder.name, spec.off_policy.max_off_policy_steps, states, _start(spec, checkpoints))
    audit.report.remarks += remarks
    audit.rises(_rises(folder, audit))
    journal = folder / JOURNAL_DIR
    try:
        for where, record in _records(journal):
            audit.record(where, record)
    except MillraceError as error:
        audit.breach(Breach.DAMAGED, "journal", f"{error}; what came after it was not audited")
    for path in sorted(journal.glob("damaged-*")):
        audit.report.remarks.append(
            f"journal/{path.name}: records that were given up, with the lineage that they were of"
        )
    for where, steps in (("history.jsonl", _history(folder)), ("the gateway's history", told)):
        if steps is not None:
            audit.history(where, steps)
    state = _state(folder) or told_state
    if state is None:
        audit.report.remarks.append("nothing says whether the job has ended: groups without a fate count as active")
    return audit.finish("journal", ended=None if state is None else JobState(state).ended)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}: name the home whose `jobs` holds the job with --home") from error


def _records(journal: Path) -> Iterator[tuple[str, BatchRecord]]:
    """Each record with its file and step."""
    if not journal.is_dir():  # opening a journal would make it
        return
    names = sorted(path.name for path in journal.glob("segment-*.wal"))
    firsts = [int(name.removeprefix("segment-").removesuffix(".wal")) for name in names]
    for record in Journal(journal).records():
        name = names[max(0, bisect_right(firsts, record.step) - 1)]
        yield f"journal/{name}, step {record.step}", record


def _start(spec: JobSpec, checkpoints: Mapping[int, Checkpoint]) -> int | None:
    """The step that the job began at; None for one that went on from another's, where no checkpoint says from which step."""
    for checkpoint in checkpoints.values():
        return int(checkpoint.state["start_step"])
    return None if spec.checkpoint.load else 0


def _rises(folder: Path, audit: Audit) -> list[Rise]:
    try:
        return read_rises(folder)
    except MillraceError as error:
        audit.report.remarks.append(str(error))
        return []


def _history(folder: Path) -> list[dict[str, Any]] | None:
    """The step records in the folder, less those that a rollback took back; None without a file."""
    return JobFolder(folder).history().steps if (folder / HISTORY_FILE).is_file() else None


def _state(folder: Path) -> str | None:
    """As the folder has it; None where it does not say."""
    found = JobFolder(folder).load()
    return None if found is None else str(found[0]["state"])
