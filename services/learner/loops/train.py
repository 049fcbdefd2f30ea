"""The learner's main course, step by step.

recover ─► publish ─► evaluate ─► ┌─ next batch ─► journal ─► ack ─► train ─► publish ─► record ─► checkpoint? ─┐ ─► evaluate ─► end
                                  └──────────────────────────────────────────────────────────────────────────────┘

A paused job holds between two steps, or where it waits; what was under way comes in meanwhile.
"""

from __future__ import annotations

import asyncio
import time

from services.common.errors import ConfigError
from services.common.jobs.record import LIVE, PAUSED_CAUSE, ActiveJob, JobState
from services.common.service.lifecycle import Drain
from services.learner.groups.batch import Batch
from services.learner.groups.buffer import Judged
from services.learner.loops import metrics
from services.learner.loops.checkpoint import save, save_if_due, saved_if_possible, with_room
from services.learner.loops.issue import start_evaluation
from services.learner.loops.recover import recover
from services.learner.loops.state import (
    Flow,
    JobContext,
    NoStepPossible,
    NotFinite,
    Stopped,
    wait_event,
)
from services.learner.loops.step_record import StepTimes, step_record
from services.learner.loops.train_batch import train_batch
from services.learner.ranks.snapshot import make_snapshot
from services.learner.storage.journal import BatchRecord

LOOK_AGAIN_S = 1.0
CANCELLED = "cancelled on request"


async def step_loop(job: JobContext, drain: Drain) -> None:
    """Runs the job from where it stands to its end.

    consumes:     ready groups
    waits for:    a batch, an evaluation; a second at a time, and the warden names what is missing
    unblocked by: the collect loop
    produces:     weights, step records, checkpoints
    """
    try:
        await _run(job, drain)
    except Stopped:
        if job.control.stopping:
            await _end(job, drain, JobState.CANCELLED, job.control.stopping)
    except ConfigError as error:
        await _finish(job, JobState.FAILED, str(error))
    await saved_if_possible(job)
    await job.ranks.finish()
    drain.request()


async def _run(job: JobContext, drain: Drain) -> None:
    try:
        await _begin(job, drain)
        if job.progress.step == job.progress.start_step:
            await _evaluate(job, drain)
        while job.steps_left > 0:
            await _step(job, drain)
        await _evaluate(job, drain)
    except (NotFinite, NoStepPossible) as error:
        await _end(job, drain, JobState.FAILED, str(error))
    else:
        await _end(job, drain, JobState.SUCCEEDED, "")


async def _begin(job: JobContext, drain: Drain) -> None:
    record = await job.store.record()
    if record.state.ended:
        raise Stopped  # these ranks were started again after the end
    if record.pause_requested:
        job.control.pause()
    if record.cancel_requested:
        job.control.stopping = CANCELLED
    metrics.observe_job(job.job_id, slots=job.spec.slots, ranks=job.spec.learner.world_size)
    await recover(job, drain)
    job.progress.require_finite()
    if job.control.stopping:
        raise Stopped
    if job.spec.checkpoint.load is not None and job.saving.saved_step is None:
        await save(job, drain, wait=True)  # from here on the job does not depend on where it began
    await _publish(job)
    await job.store.update(lineage=job.progress.lineage, step=job.progress.step, policy_version=job.progress.step)
    job.progress.published = True
    job.activity.moved()
    if not await hold(job, drain):
        await job.store.transition(JobState.RUNNING, allowed=LIVE)


async def hold(job: JobContext, drain: Drain) -> bool:
    """Keeps a paused job where it is: saved, said to be paused, its servers attached. Whether it was paused.

    consumes:     nothing
    waits for:    the end of the pause, a tenth of a second at a time
    unblocked by: the watch loop
    produces:     a checkpoint, the states `paused` and `running`

    Raises:
        Stopped: the job was cancelled, or the learner drains; a job that is paused then is paused again when the learner is back.
    """
    if not job.control.paused:
        return False
    await save(job, drain, wait=True)
    await job.store.update(**job.intake.ledger.accounts())
    await job.store.transition(JobState.PAUSED, allowed=LIVE, cause=PAUSED_CAUSE)
    if not await job.control.resumed(drain):
        raise Stopped
    await job.store.transition(JobState.RUNNING, allowed=LIVE)
    return True


async def _step(job: JobContext, drain: Drain) -> None:
    await hold(job, drain)
    started = time.monotonic()
    with metrics.CLOCK.phase(metrics.WAIT_SECONDS):
        groups = await _next_batch(job, drain)
    if groups is None:
        return
    times = StepTimes(wait_s=time.monotonic() - started)
    journalled = await _journal(job, drain, groups)
    batch = Batch.of(groups, job.spec)
    with metrics.CLOCK.phase(metrics.TRAIN_SECONDS):
        trained = await train_batch(job, batch)
    await _publish(job)
    job.intake.published()
    job.activity.issue_now.set()
    times.step_s = time.monotonic() - started
    record = step_record(job, trained, times, journalled.digest, lineage=job.progress.lineage)
    job.activity.flow = Flow()
    await job.store.update(step=job.progress.step, policy_version=job.progress.step, **job.intake.ledger.accounts())
    await job.store.append_step(job.progress.step - job.progress.start_step, record)
    await with_room(job, drain, job.store.write_history)
    metrics.observe_step(record, trained.ages)
    job.progress.require_finite()
    await hold(job, drain)
    every = job.spec.eval.interval_steps
    if job.spec.eval.enabled and every and job.progress.step % every == 0 and job.steps_left:
        await start_evaluation(job)
    await save_if_due(job, drain)
    job.activity.moved()


async def _next_batch(job: JobContext, drain: Drain) -> list[Judged] | None:
    """The groups of the next step, or None when the job was paused before they were there."""
    job.activity.waiting_for = "scored groups"
    while True:
        job.control.require_progress(drain)
        if job.control.paused:
            return None
        groups = job.intake.select(job.progress.step)
        if groups is not None:
            break
        await wait_event(job.activity.step_now, LOOK_AGAIN_S)
    job.activity.waiting_for = ""
    if len(groups) < job.spec.algorithm.groups_per_step:
        message = f"{job.intake.judged_since_step} groups were judged for one step, {len(groups)} were informative: it trains on those"
        await job.store.event("filter_groups_max_batches", {"step": job.progress.step + 1, "message": message})
    return groups


async def _journal(job: JobContext, drain: Drain, groups: list[Judged]) -> BatchRecord:
    """Makes the batch durable, and only then lets its entries go; gives the record.

    Raises:
        Stopped: there was no space until the job was stopped; nothing was written, and the entries come again.
    """
    job.intake.begin_training(groups)
    return await _write(job, drain, job.progress.step + 1, tuple(judged.payload for judged in groups))


async def _write(job: JobContext, drain: Drain, step: int, groups: tuple[bytes, ...]) -> BatchRecord:
    """Writes a record of these groups, and of every fate since the last one; lets the entries of both go."""
    mark = await job.store.history_mark()
    ledger = job.intake.ledger
    # From here to the entries nothing is awaited: what is settled meanwhile would lose its entry before a record has its fate.
    settled = tuple(ledger.take_unwritten())
    record = BatchRecord(step, job.progress.lineage, groups, settled, ledger.issued, job.publisher.digest, mark)
    entries = [judged.entry for judged in job.intake.take_settled() if judged.entry is not None]
    size = await with_room(job, drain, lambda: asyncio.to_thread(job.journal.append, record))
    metrics.JOURNAL_BYTES.inc(size)
    await job.consumer.ack(*entries)
    return record


async def _publish(job: JobContext) -> None:
    started = time.monotonic()
    weights = await job.ranks.weights()
    job.publisher.publish(make_snapshot(job.progress.lineage, job.progress.step, weights))
    active = ActiveJob(
        job.job_id,
        job.progress.lineage,
        job.publisher.address,
        job.progress.step,
        str(job.model_dir),
        job.spec.model_dump(mode="json"),
    )
    await job.store.activate(active)
    metrics.PUBLISH_SECONDS.observe(time.monotonic() - started)
    metrics.POLICY_VERSION.set(job.progress.step)


async def _evaluate(job: JobContext, drain: Drain) -> None:
    """Evaluates the policy as it is and waits for the end; the warden writes the result down. Nothing to do if it was before a restart."""
    if not job.spec.eval.enabled or job.progress.step in await job.store.evaluated_steps():
        return
    await hold(job, drain)
    evaluation = await start_evaluation(job)
    job.activity.waiting_for = f"the evaluation at step {evaluation.step}"
    while evaluation in job.evals.rounds:
        job.control.require_progress(drain)
        await hold(job, drain)
        await wait_event(job.activity.step_now, LOOK_AGAIN_S)
    job.activity.waiting_for = ""
    await with_room(job, drain, job.store.write_history)


async def _end(job: JobContext, drain: Drain, state: JobState, cause: str) -> None:
    """Gives every group that is left its fate, in the journal and in a last checkpoint, and ends the job.

    A cancelled job ends even on a full disk: what could not be written is said.
    """
    job.intake.cancel_all(f"the job {state}")
    try:
        await _write(job, drain, job.progress.step, ())
        await save(job, drain, wait=True)
    except Stopped:
        if not job.control.stopping:
            raise
        cause = ": ".join(filter(None, (cause, f"its end could not be saved: {job.control.no_space}")))
    await _finish(job, state, cause)


async def _finish(job: JobContext, state: JobState, cause: str) -> None:
    """The state comes last: a head that dies before it is started again and ends the job once more; one that dies after it is not."""
    await job.store.update(**job.intake.ledger.accounts())
    await job.store.retire()
    await job.store.transition(state, allowed=LIVE, cause=cause)
