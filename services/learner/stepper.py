"""The learner's main course, step by step.

recover ─► publish ─► evaluate ─► ┌─ next batch ─► journal ─► ack ─► train ─► publish ─► record ─► checkpoint? ─┐ ─► evaluate ─► end
                                  └──────────────────────────────────────────────────────────────────────────────┘

A paused job holds between two steps, or where it waits; what was under way comes in meanwhile.
"""

from __future__ import annotations

import asyncio
import time

from services.common.errors import ConfigError
from services.common.job_records import LIVE, PAUSED_CAUSE, ActiveJob, JobState
from services.common.lifecycle import Drain
from services.learner import metrics
from services.learner.assemble import assemble
from services.learner.context import Flow, JobContext, NoStepPossible, Stopped, wait_event
from services.learner.intake import Judged
from services.learner.issuer import start_evaluation
from services.learner.journal import BatchRecord
from services.learner.non_finite import NotFinite, notice_skip, require_finite
from services.learner.records import StepTimes, ages_of, step_record
from services.learner.recovery import recover
from services.learner.room import with_room
from services.learner.saving import save, save_if_due, saved_if_possible
from services.learner.snapshots import make_snapshot

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
        if job.stopping:
            await _end(job, drain, JobState.CANCELLED, job.stopping)
    except ConfigError as error:
        await _finish(job, JobState.FAILED, str(error))
    await saved_if_possible(job)
    await job.ranks.finish()
    drain.request()


async def _run(job: JobContext, drain: Drain) -> None:
    try:
        await _begin(job, drain)
        if job.step == job.start_step:
            await _evaluate(job, drain)
        while job.steps_left > 0:
            await _step(job, drain)
        await _evaluate(job, drain)
    except (NotFinite, NoStepPossible) as error:
        await _end(job, drain, JobState.FAILED, str(error))
    else:
        await _end(job, drain, JobState.SUCCEEDED, "")


async def _begin(job: JobContext, drain: Drain) -> None:
    record = await job.store.get(job.job_id)
    if record.state.ended:
        raise Stopped  # these ranks were started again after the end
    if record.pause_requested:
        job.pause()
    if record.cancel_requested:
        job.stopping = CANCELLED
    metrics.observe_job(job.job_id, slots=job.spec.slots, ranks=job.spec.learner.world_size)
    await recover(job, drain)
    require_finite(job)
    if job.stopping:
        raise Stopped
    if job.spec.checkpoint.load is not None and job.saved_step is None:
        await save(job, drain, wait=True)  # from here on the job does not depend on where it began
    await _publish(job)
    await job.store.update(job.job_id, lineage=job.lineage, step=job.step, policy_version=job.step)
    job.published = True
    job.moved()
    if not await hold(job, drain):
        await job.store.transition(job.job_id, JobState.RUNNING, allowed=LIVE)


async def hold(job: JobContext, drain: Drain) -> bool:
    """Keeps a paused job where it is: saved, said to be paused, its servers attached. Whether it was paused.

    consumes:     nothing
    waits for:    the end of the pause, a tenth of a second at a time
    unblocked by: the watch loop
    produces:     a checkpoint, the states `paused` and `running`

    Raises:
        Stopped: the job was cancelled, or the learner drains; a job that is paused then is paused again when the learner is back.
    """
    if not job.paused:
        return False
    await save(job, drain, wait=True)
    await job.store.update(job.job_id, **job.intake.ledger.accounts())
    await job.store.transition(job.job_id, JobState.PAUSED, allowed=LIVE, cause=PAUSED_CAUSE)
    if not await job.resumed(drain):
        raise Stopped
    await job.store.transition(job.job_id, JobState.RUNNING, allowed=LIVE)
    return True


async def _step(job: JobContext, drain: Drain) -> None:
    await hold(job, drain)
    started = time.monotonic()
    with metrics.CLOCK.phase(metrics.WAIT_SECONDS):
        groups = await _next_batch(job, drain)
    if groups is None:
        return
    times = StepTimes(wait_s=time.monotonic() - started)
    ages = ages_of(groups, job.step)
    journalled = await _journal(job, drain, groups)
    sequences = assemble(groups, job.spec)
    trained = time.monotonic()
    with metrics.CLOCK.phase(metrics.TRAIN_SECONDS):
        stats = await job.ranks.train(job.step + 1, sequences)
    times.train_s = time.monotonic() - trained
    job.step += 1
    await _publish(job)
    job.intake.published()
    job.issue_now.set()
    times.step_s = time.monotonic() - started
    record = step_record(job, groups, ages, stats, times, sequences) | {"record_digest": journalled.digest}
    job.flow = Flow()
    await job.store.update(job.job_id, step=job.step, policy_version=job.step, **job.intake.ledger.accounts())
    await job.store.append_step(job.job_id, job.step - job.start_step, record)
    await with_room(job, drain, job.store.write_history)
    metrics.observe_step(record, ages)
    notice_skip(job, stats)
    require_finite(job)
    await hold(job, drain)
    every = job.spec.eval.interval_steps
    if job.spec.eval.enabled and every and job.step % every == 0 and job.steps_left:
        await start_evaluation(job)
    await save_if_due(job, drain)
    job.moved()


async def _next_batch(job: JobContext, drain: Drain) -> list[Judged] | None:
    """The groups of the next step, or None when the job was paused before they were there."""
    job.waiting_for = "scored groups"
    while True:
        job.require_progress(drain)
        if job.paused:
            return None
        groups = job.intake.select(job.step)
        if groups is not None:
            break
        await wait_event(job.step_now, LOOK_AGAIN_S)
    job.waiting_for = ""
    if len(groups) < job.spec.algorithm.groups_per_step:
        message = f"{job.intake.judged_since_step} groups were judged for one step, {len(groups)} were informative: it trains on those"
        await job.store.event(job.job_id, "filter_groups_max_batches", {"step": job.step + 1, "message": message})
    return groups


async def _journal(job: JobContext, drain: Drain, groups: list[Judged]) -> BatchRecord:
    """Makes the batch durable, and only then lets its entries go; gives the record.

    Raises:
        Stopped: there was no space until the job was stopped; nothing was written, and the entries come again.
    """
    job.intake.begin_training(groups)
    return await _write(job, drain, job.step + 1, tuple(judged.payload for judged in groups))


async def _write(job: JobContext, drain: Drain, step: int, groups: tuple[bytes, ...]) -> BatchRecord:
    """Writes a record of these groups, and of every fate since the last one; lets the entries of both go."""
    mark = await job.store.history_mark()
    settled, entries = job.intake.take_for_record()
    record = BatchRecord(step, job.lineage, groups, settled, job.intake.ledger.issued, job.publisher.digest, mark)
    size = await with_room(job, drain, lambda: asyncio.to_thread(job.journal.append, record))
    metrics.JOURNAL_BYTES.inc(size)
    await job.consumer.ack(*entries)
    return record


async def _publish(job: JobContext) -> None:
    started = time.monotonic()
    weights = await job.ranks.weights()
    job.publisher.publish(make_snapshot(job.lineage, job.step, weights))
    active = ActiveJob(
        job.job_id, job.lineage, job.publisher.address, job.step, str(job.model_dir), job.spec.model_dump(mode="json")
    )
    await job.store.activate(active)
    metrics.PUBLISH_SECONDS.observe(time.monotonic() - started)
    metrics.POLICY_VERSION.set(job.step)


async def _evaluate(job: JobContext, drain: Drain) -> None:
    """Evaluates the policy as it is and waits for the end; the warden writes the result down. Nothing to do if it was before a restart."""
    if not job.spec.eval.enabled or job.step in await job.store.evaluated_steps(job.job_id):
        return
    await hold(job, drain)
    evaluation = await start_evaluation(job)
    job.waiting_for = f"the evaluation at step {evaluation.step}"
    while evaluation in job.rounds:
        job.require_progress(drain)
        await hold(job, drain)
        await wait_event(job.step_now, LOOK_AGAIN_S)
    job.waiting_for = ""
    await with_room(job, drain, job.store.write_history)


async def _end(job: JobContext, drain: Drain, state: JobState, cause: str) -> None:
    """Gives every group that is left its fate, in the journal and in a last checkpoint, and ends the job.

    A cancelled job ends even on a full disk: what could not be written is said.
    """
    job.intake.cancel_all(f"the job {state}")
    try:
        await _write(job, drain, job.step, ())
        await save(job, drain, wait=True)
    except Stopped:
        if not job.stopping:
            raise
        cause = ": ".join(filter(None, (cause, f"its end could not be saved: {job.no_space}")))
    await _finish(job, state, cause)


async def _finish(job: JobContext, state: JobState, cause: str) -> None:
    """The state comes last: a head that dies before it is started again and ends the job once more; one that dies after it is not."""
    await job.store.update(job.job_id, **job.intake.ledger.accounts())
    await job.store.retire(job.job_id)
    await job.store.transition(job.job_id, state, allowed=LIVE, cause=cause)
