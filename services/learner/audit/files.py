"""Reads a job's folder for the audit: spec, journal, checkpoints, and what the job said of itself.

Of a job that runs, everything is read in the order in which it must hold together: a step is journalled before it stands in the history,
and a checkpoint stands in the history before it is there.

    state ─► newest record ─► history ─► checkpoints ─► history's manifests ─► the whole journal ─► the lineages, once more
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from services.common.checkpoints.manifest import Checkpoint
from services.common.differences import MISSING, differences
from services.common.errors import ConfigError, MillraceError
from services.common.jobs.fates import Fate
from services.common.jobs.folder import JOB_FILE, SPEC_FILE, JobFolder
from services.common.jobs.record import JobState
from services.common.spec.job import JobSpec, parse_recorded_spec
from services.learner.audit.audit import Audit
from services.learner.audit.history import HistoryAudit
from services.learner.audit.report import AuditReport, Breach
from services.learner.audit.seals import SealAudit
from services.learner.storage.checkpoints import finished_checkpoints, sound_checkpoints
from services.learner.storage.folder import JOURNAL_DIR, LINEAGE_FILE
from services.learner.storage.journal import BatchRecord, Journal
from services.learner.storage.journal_key import JournalKey
from services.learner.storage.lineage import Rise, read_rises

READS = 3
"""Times that a folder is read whose lineage rises meanwhile: what was read before and after does not belong together."""
SETTLE_S = 1.0

ONLY_REPLAY = "that the batches lead to the recorded weights, and these to the checkpoints' own files: `millrace replay` proves it"
EVALUATIONS = "figures of evaluations: their groups are in no journal"

Steps = Iterable[Mapping[str, Any]]


def audit_job(
    folder: Path,
    *,
    told: Steps | None = None,
    told_state: str | None = None,
    job_id: str | None = None,
    key: JournalKey | None = None,
) -> AuditReport:
    """Audits the job whose folder this is; reads only.

    Args:
        folder: `<home>/jobs/<job>`.
        told: the step records that the gateway tells, where it can be reached; the folder's own are read anyway.
        told_state: the state that the gateway tells; the folder's own counts where it has one.
        job_id: the job, where the folder has another name.
        key: proves the seals of a journal that was written with one.

    Raises:
        ConfigError: there is no such job here, or its spec cannot be read.
    """
    for _ in range(READS - 1):
        before = _known_rises(folder)
        report = _audit(folder, told, told_state, job_id or folder.name, key)
        if _known_rises(folder) == before:
            return report
        time.sleep(SETTLE_S)
    return _audit(folder, told, told_state, job_id or folder.name, key)


def _audit(
    folder: Path, told: Steps | None, told_state: str | None, job_id: str, key: JournalKey | None
) -> AuditReport:
    spec = parse_recorded_spec(_read(folder / SPEC_FILE))
    document, fault = _job_record(folder)
    state = document["state"] if document is not None else None if told_state is None else JobState(told_state)
    complete = document is not None and document["state"] is JobState.SUCCEEDED
    journal = folder / JOURNAL_DIR
    history = HistoryAudit(folder, _newest_step(journal), complete=complete)
    checkpoints, damaged = sound_checkpoints(folder)
    history.read_manifests()
    states = {step: (f"checkpoints/{found.path.name}", found.state) for step, found in checkpoints.items()}
    audit = Audit(job_id, spec.off_policy.max_off_policy_steps, states, _start(spec, checkpoints))
    if fault:
        audit.breach(Breach.DAMAGED, JOB_FILE, fault)
    _check_checkpoints(folder, spec, checkpoints, damaged, audit)
    audit.rises(_rises(folder, audit))
    seals = SealAudit(audit, key)
    try:
        for where, record in _records(journal, key):
            audit.record(where, record)
            seals.record(where, record)
            history.check_mark(where, record, audit)
    except MillraceError as error:
        audit.cut_short("journal", f"{error}; what came after it was not audited")
    for path in sorted(journal.glob("damaged-*")):
        audit.report.remarks.append(
            f"journal/{path.name}: records that were given up, with the lineage that they were of"
        )
    history.check_steps(audit)
    for step, found in checkpoints.items():
        history.check_manifest(step, f"checkpoints/{found.path.name}", found.digest, audit)
    if told is not None:
        audit.history("the gateway's history", told)
    seals.finish()
    if state is None:
        audit.report.remarks.append("nothing says whether the job has ended: groups without a fate count as active")
    report = audit.finish("journal", ended=None if state is None else state.ended)
    if document is not None and complete:
        _check_end(document, report, audit)
    report.unproved = [ONLY_REPLAY, *report.unproved, EVALUATIONS]
    return report


def _newest_step(journal: Path) -> int:
    """The step of the newest record; 0 where there is none, or where it cannot be read, which the reading of all of it tells."""
    try:
        newest = Journal(journal).newest() if journal.is_dir() else None
    except MillraceError:
        return 0
    return 0 if newest is None else newest.step


def _check_checkpoints(
    folder: Path, spec: JobSpec, sound: Mapping[int, Checkpoint], damaged: Mapping[Path, str], audit: Audit
) -> None:
    """Those that the job keeps must verify, and be made of its spec; older ones are being removed, or could not be."""
    kept = set(finished_checkpoints(folder)[-spec.checkpoint.keep_last :])
    for path, message in damaged.items():
        if path in kept:
            audit.breach(Breach.CHECKPOINT, f"checkpoints/{path.name}", message)
        elif path.is_dir():
            audit.report.remarks.append(message)
    here = spec.model_dump(mode="json")
    for checkpoint in sound.values():
        there = checkpoint.state.get("identity", {}).get("spec", {})
        where = f"checkpoints/{checkpoint.path.name}"
        for setting, recorded, found in differences(there, here):
            if recorded is not MISSING:
                said = "nothing" if found is MISSING else found
                audit.breach(Breach.SPEC, where, f"was made with {setting} = {recorded}, and {SPEC_FILE} says {said}")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}: name the home whose `jobs` holds the job with --home") from error


def _records(journal: Path, key: JournalKey | None) -> Iterator[tuple[str, BatchRecord]]:
    """Each record with its file and step."""
    if not journal.is_dir():  # opening a journal would make it
        return
    names = sorted(path.name for path in journal.glob("segment-*.wal"))
    firsts = [int(name.removeprefix("segment-").removesuffix(".wal")) for name in names]
    for record in Journal(journal, key).records():
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
        audit.breach(Breach.DAMAGED, LINEAGE_FILE, str(error))
        return []


def _known_rises(folder: Path) -> list[Rise] | None:
    try:
        return read_rises(folder)
    except MillraceError:
        return None


def _job_record(folder: Path) -> tuple[dict[str, Any] | None, str | None]:
    """The job's record as the folder has it, or None; and what is wrong with it. A copy of a folder may come without it."""
    try:
        fault = JobFolder(folder).fault()
        found = None if fault else JobFolder(folder).load()
        return (None if found is None else found[0] | {"state": JobState(found[0]["state"])}), fault
    except FileNotFoundError:
        return None, None
    except ValueError as error:
        return None, str(error)


def _check_end(document: Mapping[str, Any], report: AuditReport, audit: Audit) -> None:
    """A job that has succeeded said what its journal says, the fates included, unless records were given up."""
    found: dict[str, object] = {"step": report.steps}
    if not report.given_up:
        found |= {"issued": report.issued, **{fate.value: report.fates[fate] for fate in Fate}}
    said = {**document.get("groups", {}), **{name: document[name] for name in ("step",) if name in document}}
    for name, value in found.items():
        if said.get(name, value) != value:
            audit.breach(Breach.HISTORY, JOB_FILE, f"{name} is {said[name]}, and {value} by the journal")
