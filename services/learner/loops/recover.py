"""How a job comes back to where it was: newest verified checkpoint ─► journal, the same batches in the same order ─► the same weights.

Nothing that a record of the journal holds is generated again. Groups that were ready, and not yet in a record, are in no checkpoint either:
their entries were never acked, so Redis delivers them again; if it lost them, they have no fate and are issued again.

When what comes back is less than what was there (a damaged record, a published version that nothing here leads to), the lineage rises.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Any

from services.common.checkpoints.manifest import CheckpointRefused
from services.common.checkpoints.origin import Origin, check_origin, find_origin, verify_origin, weights_of
from services.common.jobs.fates import FATES_FILE, read_fates
from services.common.service.lifecycle import Drain
from services.common.weights.version import PolicyVersion
from services.learner.groups.batch import Batch
from services.learner.groups.ledger import Ledger
from services.learner.loops.checkpoint import with_room
from services.learner.loops.state import Flow, JobContext, require_finite_weights
from services.learner.loops.step_record import StepTimes, step_record
from services.learner.loops.train_batch import train_batch
from services.learner.storage.journal import BatchRecord, JournalError
from services.learner.storage.lineage import LineageError, Rise, raise_lineage, read_rises
from services.learner.storage.offline import rises_on_disk

log = logging.getLogger(__name__)


async def recover(job: JobContext, drain: Drain) -> None:
    """Brings ranks, ledger and lineage to where checkpoint and journal end.

    Raises:
        Stopped: the learner drains while there is no space to say so.
        ConfigError: the checkpoint was made of something else than this job, `checkpoint.load` cannot be loaded, or weights are not finite.
    """
    rises, doubts = _known_rises(job)
    job.progress.lineage = rises[-1].lineage
    await _load(job)
    base, damage = job.progress.step, None
    try:
        for record in job.journal.records(after_step=base):
            await _replay(job, record)
    except JournalError as error:
        damage = error
        doubts.append(str(error))
    job.progress.recovered_step = job.progress.step
    if damage is None and (job.journal.last_step or 0) < base > max(rises[-1].after_step, job.progress.start_step):
        doubts.append(f"the journal ends before the checkpoint's step {base}")
    known = await _published(job)
    if known > PolicyVersion(rises[-1].lineage, job.progress.step):
        doubts.append(
            f"version {known.n} of lineage {known.lineage} was published, and only step {job.progress.step} came back"
        )
    lineage, reason = rises[-1].lineage, "; ".join(doubts)
    if doubts:
        lineage = max(lineage, known.lineage) + 1

    async def settle() -> None:
        if doubts:
            raise_lineage(job.folder, rises, lineage, job.progress.step, reason)
        if damage is not None:
            log.warning("put aside in %s: %s", job.journal.cut(damage), damage)

    await with_room(job, drain, settle)
    await with_room(job, drain, lambda: job.store.rewind(job.progress.step))
    await _know_failures(job)
    await _enter(job, lineage, reason)


async def _load(job: JobContext) -> None:
    """The newest checkpoint of the job's own; without one, what `checkpoint.load` names, which is saved as the job's own at once."""
    checkpoint = await asyncio.to_thread(job.checkpoints.newest)
    if checkpoint is not None:
        differences = job.identity.differences(checkpoint.state["identity"])
        if differences:
            raise CheckpointRefused(
                f"{checkpoint.path} was not made of what this job is made of: {'; '.join(differences)}"
            )
        log.info("resuming from the checkpoint of step %d", checkpoint.step)
        await job.ranks.load(checkpoint.path)
        await require_finite_weights(job, str(checkpoint.path))
        job.progress.step = job.saving.saved_step = job.saving.begun_step = checkpoint.step
        _take_state(job, checkpoint.state)
    elif (origin := find_origin(job.spec, job.settings)) is not None:
        check_origin(origin, job.spec, job.identity)
        await _begin_elsewhere(job, origin)
        await require_finite_weights(job, f"checkpoint.load: {job.spec.checkpoint.load}")
    else:
        await require_finite_weights(job, f"model.path: {job.model_dir}")


def _take_state(job: JobContext, state: dict[str, Any]) -> None:
    job.intake.ledger = Ledger.restore(state["ledger"])
    job.progress.start_step, job.tasks.offset = int(state["start_step"]), int(state["data_offset"])
    job.progress.skipped_in_a_row = int(state["skipped_in_a_row"])


async def _begin_elsewhere(job: JobContext, origin: Origin) -> None:
    checkpoint, how = origin.checkpoint, job.spec.checkpoint
    if checkpoint is not None:
        await asyncio.to_thread(verify_origin, checkpoint)
    if checkpoint is None or how.finetune:
        folder, hugging_face = weights_of(origin, job.spec)
        log.info("beginning with the weights of %s", folder)
        await job.ranks.load_weights(folder, hugging_face=hugging_face)
        return
    log.info("beginning at step %d of %s", checkpoint.step, checkpoint.path)
    await job.ranks.load(checkpoint.path, optimizer=not how.no_load_optim, rng=not how.no_load_rng)
    job.progress.step = job.progress.start_step = job.saving.begun_step = checkpoint.step
    # a task below the frontier was decided there; what was in flight is asked again rather than left out
    job.tasks.offset = int(checkpoint.state["data_offset"]) + int(checkpoint.state["ledger"]["frontier"])


async def _replay(job: JobContext, record: BatchRecord) -> None:
    """Trains a journalled batch again; its step goes into the history if it did not before, marked as replayed."""
    job.intake.ledger.replay(record.issued, list(record.settled))
    if not record.groups:
        return
    log.info("training step %d again from the journal", record.step)
    batch = Batch.of_payloads(record.groups, job.spec)
    job.activity.flow = Flow()
    for judged in batch.groups:
        job.activity.flow.take(judged.scored)
    job.progress.step = record.step - 1
    trained = await train_batch(job, batch)
    times = StepTimes(wait_s=0.0, step_s=trained.train_s)
    step = step_record(job, trained, times, record.digest, lineage=record.lineage)
    await job.store.append_step(job.progress.step - job.progress.start_step, step.model_copy(update={"replayed": True}))
    job.activity.flow = Flow()


async def _know_failures(job: JobContext) -> None:
    """Counts the failures of before by reason again: those of the journal, as the list beside it has them, and those of no record yet."""
    ledger = job.intake.ledger
    try:
        told = await asyncio.to_thread(read_fates, job.folder / FATES_FILE, fate=None, offset=0, limit=0)
        reasons = told.failed_reasons
    except (OSError, ValueError, KeyError, TypeError):
        reasons = Counter()  # it is made anew with the next record
    ledger.failed_reasons.clear()
    ledger.count_failures(reasons + ledger.unwritten_failures())
    ledger.newest_failure = ledger.newest_failure or (await job.store.record()).failure


async def _enter(job: JobContext, lineage: int, reason: str) -> None:
    """Takes the lineage on, and tells why where it is a new one."""
    job.progress.lineage = job.tasks.lineage = lineage
    oldest = max(0, job.progress.step - job.spec.off_policy.max_off_policy_steps)
    for group in job.intake.ledger.active.values():
        group.issue_version = oldest
    if reason:
        log.warning("lineage %d begins after step %d: %s", lineage, job.progress.step, reason)
        told = {"lineage": lineage, "step": job.progress.step, "message": reason}
        await job.store.event("lineage", told)


async def _published(job: JobContext) -> PolicyVersion:
    """The newest version that Redis knows of; (0, 0) for none."""
    record, active = await job.store.record(), await job.store.active()
    announced = PolicyVersion(active.lineage, active.policy_version) if active is not None else PolicyVersion(0, 0)
    return max(PolicyVersion(record.lineage, record.policy_version), announced)


def _known_rises(job: JobContext) -> tuple[list[Rise], list[str]]:
    try:
        return read_rises(job.folder), []
    except LineageError as error:
        log.warning("%s", error)
        return rises_on_disk(job.folder), [str(error)]
