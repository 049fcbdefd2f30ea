"""Audit of a job's folder: its spec, journal, checkpoints, and the job's own record and history.

A running job changes while it is read. The order of reading keeps the parts consistent: a step is journalled before it is in the
history, and a checkpoint is in the history before its directory exists.

    state ─► newest record ─► history ─► checkpoints ─► history's manifests ─► the whole journal ─► the lineages, once more
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from services.common.checkpoints.manifest import CHECKPOINTS_DIR, Checkpoint, committed_checkpoints
from services.common.differences import MISSING, differences
from services.common.errors import ConfigError, MillraceError
from services.common.jobs.fates import Fate
from services.common.jobs.folder import JOB_FILE, SPEC_FILE, JobFolder
from services.common.jobs.record import JobState
from services.common.spec.job import JobSpec, parse_recorded_spec
from services.common.streams.limits import entry_limit
from services.learner.audit.audit import Audit
from services.learner.audit.history import HistoryAudit
from services.learner.audit.report import AuditReport, Breach
from services.learner.audit.seals import SealAudit
from services.learner.storage.checkpoints import verify_checkpoints
from services.learner.storage.folder import JOURNAL_DIR, LINEAGE_FILE
from services.learner.storage.journal import BatchRecord, Journal
from services.learner.storage.journal_key import JournalKey
from services.learner.storage.lineage import Rise, read_rises

MAX_READS = 3
"""Reads of a folder whose lineage rises meanwhile: the parts read before and after it do not match."""
SETTLE_S = 1.0

ONLY_REPLAY = "that the batches lead to the recorded weights, and these to the checkpoints' own files: `millrace replay` proves it"
EVALUATIONS = "figures of evaluations: their groups are in no journal"

Steps = Iterable[Mapping[str, Any]]


def audit_job(
    folder: Path,
    *,
    reported_steps: Steps | None = None,
    reported_state: str | None = None,
    job_id: str | None = None,
    key: JournalKey | None = None,
) -> AuditReport:
    """Audits the job in a folder, `<home>/jobs/<job>`; reads only.

    Args:
        folder: the job's.
        reported_steps: the gateway's step records, where it can be reached; the folder's own are read anyway.
        reported_state: the gateway's state of the job; the folder's own has precedence.
        job_id: the job, where the folder has another name.
        key: of a journal that was written with one; proves its seals.

    Raises:
        ConfigError: there is no such job here, or its spec cannot be read.
    """
    for reads_left in reversed(range(MAX_READS)):
        before = _rises(folder)
        report = _audit(folder, reported_steps, reported_state, job_id or folder.name, key)
        if not reads_left or _rises(folder) == before:
            break
        time.sleep(SETTLE_S)
    return report


def _audit(
    folder: Path, reported_steps: Steps | None, reported_state: str | None, job_id: str, key: JournalKey | None
) -> AuditReport:
    spec = _spec(folder)
    document, fault = _job_record(folder)
    state = document["state"] if document is not None else None if reported_state is None else JobState(reported_state)
    complete = document is not None and document["state"] is JobState.SUCCEEDED
    journal = folder / JOURNAL_DIR
    history = HistoryAudit(folder, _newest_step(journal), complete=complete)
    checkpoints, damaged = verify_checkpoints(folder)
    history.read_manifests()
    states = {step: (f"checkpoints/{found.path.name}", found.state) for step, found in checkpoints.items()}
    limit_bytes = entry_limit(spec.rollout, spec.eval)
    audit = Audit(job_id, spec.off_policy.max_off_policy_steps, states, _start(spec, checkpoints), limit_bytes)
    if fault:
        audit.breach(Breach.DAMAGED, JOB_FILE, fault)
    _check_checkpoints(folder, spec, checkpoints, damaged, audit)
    try:
        audit.rises = read_rises(folder)
    except MillraceError as error:
        audit.breach(Breach.DAMAGED, LINEAGE_FILE, str(error))
    seals = SealAudit(audit, key)
    try:
        for where, record in _records(journal, key):
            audit.record(where, record)
            seals.record(where, record)
            history.check_mark(where, record, audit)
    except MillraceError as error:
        audit.cut_short("journal", f"{error}; what came after it was not audited")
    audit.report.remarks += [
        f"journal/{path.name}: records that were given up, with the lineage that they were of"
        for path in sorted(journal.glob("damaged-*"))
    ]
    history.check_steps(audit)
    for step, found in checkpoints.items():
        history.check_manifest(step, f"checkpoints/{found.path.name}", found.digest, audit)
    if reported_steps is not None:
        audit.history("the gateway's history", reported_steps)
    seals.finish()
    if state is None:
        audit.report.remarks.append("nothing says whether the job has ended: groups without a fate count as active")
    report = audit.finish("journal", ended=None if state is None else state.ended)
    if document is not None and complete:
        _check_end(document, report, audit)
    report.unproved = [ONLY_REPLAY, *report.unproved, EVALUATIONS]
    return report


def _newest_step(journal: Path) -> int:
    """The step of the newest record; 0 where there is none, or where it cannot be read: the full read later reports that."""
    try:
        newest = Journal(journal).newest() if journal.is_dir() else None
    except MillraceError:
        return 0
    return 0 if newest is None else newest.step


def _check_checkpoints(
    folder: Path, spec: JobSpec, sound: Mapping[int, Checkpoint], damaged: Mapping[Path, str], audit: Audit
) -> None:
    """The checkpoints that the job keeps must verify, and be made of its spec; older ones are being removed, or could not be."""
    kept = set(committed_checkpoints(folder / CHECKPOINTS_DIR)[-spec.checkpoint.keep_last :])
    for path, message in damaged.items():
        if path in kept:
            audit.breach(Breach.CHECKPOINT, f"checkpoints/{path.name}", message)
        elif path.is_dir():
            audit.report.remarks.append(message)
    document = spec.model_dump(mode="json")
    for checkpoint in sound.values():
        made_of = checkpoint.state.get("identity", {}).get("spec", {})
        where = f"checkpoints/{checkpoint.path.name}"
        for setting, recorded, found in differences(made_of, document):
            if recorded is not MISSING:
                now = "nothing" if found is MISSING else found
                audit.breach(Breach.SPEC, where, f"was made with {setting} = {recorded}, and {SPEC_FILE} says {now}")


def _spec(folder: Path) -> JobSpec:
    path = folder / SPEC_FILE
    try:
        return parse_recorded_spec(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}: name the home whose `jobs` holds the job with --home") from error


def _records(journal: Path, key: JournalKey | None) -> Iterator[tuple[str, BatchRecord]]:
    if not journal.is_dir():  # `Journal` would create it
        return
    for segment, record in Journal(journal, key).located():
        yield f"journal/{segment.name}, step {record.step}", record


def _start(spec: JobSpec, checkpoints: Mapping[int, Checkpoint]) -> int | None:
    """The step that the job began at; None for one that loaded a checkpoint, where no checkpoint of its own names the step."""
    for checkpoint in checkpoints.values():
        return int(checkpoint.state["start_step"])
    return None if spec.checkpoint.load else 0


def _rises(folder: Path) -> list[Rise] | None:
    try:
        return read_rises(folder)
    except MillraceError:
        return None


def _job_record(folder: Path) -> tuple[dict[str, Any] | None, str | None]:
    """The folder's record of the job, or None; and its fault, if it has one. A copy of a folder may lack the record."""
    try:
        fault = JobFolder(folder).fault()
        found = None if fault else JobFolder(folder).load()
        return (None if found is None else found[0] | {"state": JobState(found[0]["state"])}), fault
    except FileNotFoundError:
        return None, None
    except ValueError as error:
        return None, str(error)


def _check_end(document: Mapping[str, Any], report: AuditReport, audit: Audit) -> None:
    """The record of a job that has succeeded must agree with its journal, the fates included, unless records were given up."""
    expected: dict[str, object] = {"step": report.steps}
    if not report.given_up:
        expected |= {"issued": report.issued, **{fate.value: report.fates[fate] for fate in Fate}}
    recorded = document.get("groups", {}) | {name: document[name] for name in ("step",) if name in document}
    for name, value in expected.items():
        if recorded.get(name, value) != value:
            audit.breach(Breach.HISTORY, JOB_FILE, f"{name} is {recorded[name]}, and {value} by the journal")
