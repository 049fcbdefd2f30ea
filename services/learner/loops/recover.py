"""Recovery of a job: newest verified checkpoint ─► journal, the same batches in the same order ─► the same weights.

No group in a journal record is generated again. Groups that were ready, but in no record yet, are in no checkpoint either: their entries
were never acked, so Redis delivers them again; if Redis has lost them, they have no fate and are issued again.

When less is recovered than there was (a damaged record, a published version that no checkpoint or record leads to), the lineage rises.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

from services.common.checkpoints.manifest import CheckpointRefused
from services.common.checkpoints.origin import Origin, check_origin, find_origin, verify_origin
from services.common.jobs.fates import FATES_FILE, read_fates
from services.common.service.lifecycle import Drain
from services.common.weights.snapshot import PolicyVersion
from services.learner.groups.batch import Batch
from services.learner.groups.ledger import Ledger
from services.learner.loops.checkpoint import with_disk_space
from services.learner.loops.state import Flow, JobContext, require_finite_weights
from services.learner.loops.step import step_record, train_batch
from services.learner.storage.journal import BatchRecord, JournalError
from services.learner.storage.lineage import LineageError, Rise, raise_lineage, read_rises
from services.learner.storage.offline import lineages_on_disk

log = logging.getLogger(__name__)


async def recover(job: JobContext, drain: Drain) -> None:
    """Restores ranks, ledger and lineage to the end of checkpoint and journal.

    Raises:
        Stopped: the learner drains while the disk is full.
        ConfigError: the checkpoint belongs to another job or input, `checkpoint.load` cannot be loaded, or weights are not finite.
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
    known, step = await _published(job), job.progress.step
    if known > PolicyVersion(rises[-1].lineage, step):
        doubts.append(f"version {known.n} of lineage {known.lineage} was published, and only step {step} came back")
    lineage, reason = rises[-1].lineage, "; ".join(doubts)
    if doubts:
        lineage = max(lineage, known.lineage) + 1

    async def settle() -> None:
        if doubts:
            raise_lineage(job.folder, rises, lineage, job.progress.step, reason)
        if damage is not None:
            log.warning("put aside in %s: %s", job.journal.cut(damage), damage)

    await with_disk_space(job, drain, settle)
    await with_disk_space(job, drain, lambda: job.store.rewind(job.progress.step))
    await _count_failures(job)
    await _enter_lineage(job, lineage, reason)


async def _load(job: JobContext) -> None:
    """Loads the job's newest checkpoint; without one, the source that `checkpoint.load` names, which the train loop then saves."""
    checkpoint = await asyncio.to_thread(job.checkpoints.newest)
    if checkpoint is not None:
        if differences := "; ".join(job.identity.differences(checkpoint.state["identity"])):
            raise CheckpointRefused(f"{checkpoint.path} was not made of what this job is made of: {differences}")
        log.info("resuming from the checkpoint of step %d", checkpoint.step)
        await job.ranks.load(checkpoint.path)
        await require_finite_weights(job, str(checkpoint.path))
        job.progress.step = job.saving.saved_step = job.saving.begun_step = checkpoint.step
        state = checkpoint.state
        job.buffer.ledger = Ledger.restore(state["ledger"])
        job.progress.start_step, job.tasks.offset = int(state["start_step"]), int(state["data_offset"])
        job.progress.skipped_in_a_row = int(state["skipped_in_a_row"])
    elif (origin := find_origin(job.spec, job.settings)) is not None:
        check_origin(origin, job.spec, job.identity)
        await _load_origin(job, origin)
        await require_finite_weights(job, f"checkpoint.load: {job.spec.checkpoint.load}")
    else:
        await require_finite_weights(job, f"model.path: {job.model_dir}")


async def _load_origin(job: JobContext, origin: Origin) -> None:
    checkpoint, options = origin.checkpoint, job.spec.checkpoint
    if checkpoint is not None:
        await asyncio.to_thread(verify_origin, checkpoint)
    if checkpoint is None or origin.gives_weights_only(job.spec):
        log.info("beginning with the weights of %s", origin.path)
        await job.ranks.load_weights(origin.path, hugging_face=checkpoint is None)
        return
    log.info("beginning at step %d of %s", checkpoint.step, checkpoint.path)
    await job.ranks.load(checkpoint.path, optimizer=not options.no_load_optim, rng=not options.no_load_rng)
    job.progress.step = job.progress.start_step = job.saving.begun_step = checkpoint.step
    # Tasks below the frontier have a fate in that job; those that were in flight there are issued again rather than left out.
    job.tasks.offset = int(checkpoint.state["data_offset"]) + int(checkpoint.state["ledger"]["frontier"])


async def _replay(job: JobContext, record: BatchRecord) -> None:
    """Trains a journalled batch again; its step is added to the history if it is missing there, marked as replayed."""
    job.buffer.ledger.replay(record.issued, list(record.settled))
    if not record.groups:
        return
    log.info("training step %d again from the journal", record.step)
    batch = Batch.of_payloads(record.groups, job.spec)
    job.activity.flow = Flow()
    for judged in batch.groups:
        job.activity.flow.count(judged.scored)
    job.progress.step = record.step - 1
    trained = await train_batch(job, batch)
    step = step_record(job, trained, record.digest, lineage=record.lineage, wait_s=0.0, step_s=trained.train_s)
    await job.store.append_step(job.progress.step - job.progress.start_step, step.model_copy(update={"replayed": True}))
    job.activity.flow = Flow()


async def _count_failures(job: JobContext) -> None:
    """Restores the failure counts by reason: from the journal's fate log, and from fates that are in no record yet."""
    ledger = job.buffer.ledger
    try:
        fates = await asyncio.to_thread(read_fates, job.folder / FATES_FILE, fate=None, offset=0, limit=0)
        reasons = fates.failed_reasons
    except (OSError, ValueError, KeyError, TypeError):
        reasons = Counter()  # the fate log is rewritten with the next record
    ledger.failed_reasons.clear()
    ledger.count_failures(reasons + ledger.unwritten_failures())
    ledger.newest_failure = ledger.newest_failure or (await job.store.record()).failure


async def _enter_lineage(job: JobContext, lineage: int, reason: str) -> None:
    """Sets the lineage, and reports the reason for a new one."""
    job.progress.lineage = job.tasks.lineage = lineage
    oldest = max(0, job.progress.step - job.spec.off_policy.max_off_policy_steps)
    for group in job.buffer.ledger.active.values():
        group.issue_version = oldest
    if reason:
        log.warning("lineage %d begins after step %d: %s", lineage, job.progress.step, reason)
        await job.store.event("lineage", {"lineage": lineage, "step": job.progress.step, "message": reason})


async def _published(job: JobContext) -> PolicyVersion:
    """The newest version that Redis knows; (0, 0) for none."""
    record, active = await job.store.record(), await job.store.active()
    announced = PolicyVersion(active.lineage, active.policy_version) if active is not None else PolicyVersion(0, 0)
    return max(PolicyVersion(record.lineage, record.policy_version), announced)


def _known_rises(job: JobContext) -> tuple[list[Rise], list[str]]:
    try:
        return read_rises(job.folder), []
    except LineageError as error:
        log.warning("%s", error)
        return lineages_on_disk(job.folder), [str(error)]
