"""Train loop: the main sequence of a job, step by step.

recover ─► publish ─► evaluate ─► ┌─ next batch ─► journal ─► ack ─► turn ─► train ─► publish ─► record ─► checkpoint? ─┐ ─► evaluate ─► end
                                  └──────────────────────────────────────────────────────────────────────────────────────┘

The turn is waited for only where engine and learner share devices. A paused job stops between two steps, or where it waits; groups in
flight still arrive meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial

from services.common.errors import ConfigError
from services.common.jobs.record import LIVE, PAUSED_CAUSE, ActiveJob, JobState
from services.common.service.lifecycle import Drain
from services.common.weights.snapshot import PolicyVersion
from services.learner.groups.batch import Batch
from services.learner.groups.buffer import Judged
from services.learner.loops import metrics
from services.learner.loops.checkpoint import save, save_if_due, wait_saved_if_possible, with_disk_space
from services.learner.loops.issue import start_evaluation
from services.learner.loops.recover import recover
from services.learner.loops.state import CANCELLED, Flow, JobContext, NoStepPossibleError, Stopped, wait_event
from services.learner.loops.step import step_record, train_batch
from services.learner.storage.journal import BatchRecord

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 1.0
TURN_LIMIT_S = 30.0
"""Longest wait for servers that share the learner's devices to stop sampling."""


async def train_loop(job: JobContext, drain: Drain) -> None:
    """Runs the job from its recovery to its end.

    consumes:     ready groups
    waits for:    a batch, an evaluation; POLL_INTERVAL_S at a time, and the monitor loop reports what is missing
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
    await wait_saved_if_possible(job)
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
    except NoStepPossibleError as error:
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
    metrics.observe_job(job.job_id, slots=job.spec.slots, ranks=job.spec.world_size)
    await recover(job, drain)
    job.progress.require_finite()
    if job.control.stopping:
        raise Stopped
    if job.spec.checkpoint.load is not None and job.saving.saved_step is None:
        await save(job, drain, wait=True)  # from here on the job does not depend on its origin
    await _publish(job)
    await job.store.update(lineage=job.progress.lineage, step=job.progress.step, policy_version=job.progress.step)
    job.progress.published = True
    job.activity.moved()
    if not await hold(job, drain):
        await job.store.transition(JobState.RUNNING, allowed=LIVE)


async def hold(job: JobContext, drain: Drain) -> bool:
    """Holds a paused job: saved, in the state `paused`, its servers attached. Returns whether the job was paused.

    consumes:     nothing
    waits for:    the end of the pause (`Control.resumed`)
    unblocked by: the monitor loop
    produces:     a checkpoint, the states `paused` and `running`

    Raises:
        Stopped: the job was cancelled, or the learner drains; a job that is paused then is paused again after the restart.
    """
    if not job.control.paused:
        return False
    await save(job, drain, wait=True)
    await job.store.update(**job.buffer.ledger.accounts())
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
    wait_s = time.monotonic() - started
    job.buffer.begin_training(groups)
    journalled = await _write_journal(job, drain, job.progress.step + 1, tuple(judged.payload for judged in groups))
    batch, began = Batch.of(groups, job.spec), time.time()
    await _take_turn(job)
    with metrics.CLOCK.phase(metrics.TRAIN_SECONDS):
        trained = await train_batch(job, batch)
    await _publish(job)
    job.buffer.published()
    job.activity.issue_now.set()
    ids = [judged.group_id for judged in groups]
    job.traces.trained(ids, step=job.progress.step, lineage=job.progress.lineage, began=began)
    step_s = time.monotonic() - started
    record = step_record(job, trained, journalled.digest, lineage=job.progress.lineage, wait_s=wait_s, step_s=step_s)
    job.activity.flow = Flow()
    reward = {} if record.reward is None else {"reward": record.reward}
    accounts = job.buffer.ledger.accounts()
    await job.store.update(step=job.progress.step, policy_version=job.progress.step, **reward, **accounts)
    await job.store.append_step(job.progress.step - job.progress.start_step, record)
    await with_disk_space(job, drain, job.store.write_history)
    log.info("%s", record.line(job.spec.learner.steps))
    metrics.observe_step(record, trained.ages)
    job.progress.require_finite()
    await hold(job, drain)
    every = job.spec.eval.interval_steps
    if job.spec.eval.enabled and every and job.progress.step % every == 0 and job.steps_left:
        await start_evaluation(job)
    await save_if_due(job, drain)
    job.activity.moved()


async def _next_batch(job: JobContext, drain: Drain) -> list[Judged] | None:
    """The groups of the next step, or None when the job was paused before they were ready."""
    job.activity.waiting_for = "scored groups"
    while True:
        job.control.require_progress(drain)
        if job.control.paused:
            return None
        if (groups := job.buffer.select(job.progress.step)) is not None:
            break
        await wait_event(job.activity.step_now, POLL_INTERVAL_S)
    job.activity.waiting_for = ""
    if len(groups) < job.spec.algorithm.groups_per_step:
        message = f"{job.buffer.judged_since_step} groups were judged for one step, {len(groups)} were informative: it trains on those"
        await job.store.event("filter_groups_max_batches", {"step": job.progress.step + 1, "message": message})
    return groups


async def _write_journal(job: JobContext, drain: Drain, step: int, groups: tuple[bytes, ...]) -> BatchRecord:
    """Makes a record durable, of these groups and of every fate since the last record, and only then acks the entries of both.

    Raises:
        Stopped: the disk was full until the job was stopped; nothing was written, and the entries are delivered again.
    """
    mark = await job.store.history_mark()
    settled, entries = job.buffer.take_for_record()
    record = BatchRecord(
        step, job.progress.lineage, groups, settled, job.buffer.ledger.issued, job.publisher.digest, mark
    )
    size = await with_disk_space(job, drain, lambda: asyncio.to_thread(job.journal.append, record))
    metrics.JOURNAL_BYTES.inc(size)
    await job.consumer.ack(*entries)
    job.traces.settled(settled, job.progress.lineage)
    return record


async def _take_turn(job: JobContext) -> None:
    """On shared devices: no server samples from here to the step's version."""
    if not job.spec.takes_turns:
        return
    with metrics.CLOCK.phase(metrics.WAIT_SECONDS):
        missing = await job.publisher.begin_turn(TURN_LIMIT_S)
    if missing:
        names = ", ".join(missing)
        log.warning("step %d is trained while these sample still: %s", job.progress.step + 1, names)


async def _publish(job: JobContext) -> None:
    started, lineage, step = time.monotonic(), job.progress.lineage, job.progress.step
    await job.publisher.publish(PolicyVersion(lineage, step), partial(job.ranks.write_weights, lineage=lineage, n=step))
    address, model_dir, spec = job.publisher.address, str(job.model_dir), job.spec.model_dump(mode="json")
    await job.store.activate(ActiveJob(job.job_id, lineage, address, step, model_dir, spec))
    metrics.PUBLISH_SECONDS.observe(time.monotonic() - started)
    metrics.POLICY_VERSION.set(step)


async def _evaluate(job: JobContext, drain: Drain) -> None:
    """Evaluates the current policy and waits for the result, which the monitor loop writes; skipped if done before a restart."""
    if not job.spec.eval.enabled or job.progress.step in await job.store.evaluated_steps():
        return
    await hold(job, drain)
    evaluation = await start_evaluation(job)
    job.activity.waiting_for = f"the evaluation at step {evaluation.step}"
    while evaluation in job.evals.rounds:
        job.control.require_progress(drain)
        await hold(job, drain)
        await wait_event(job.activity.step_now, POLL_INTERVAL_S)
    job.activity.waiting_for = ""
    await with_disk_space(job, drain, job.store.write_history)


async def _end(job: JobContext, drain: Drain, state: JobState, cause: str) -> None:
    """Gives every remaining group its fate, in the journal and in a last checkpoint, and ends the job.

    A cancelled job ends even on a full disk: its cause then names what could not be written.
    """
    job.buffer.cancel_all(f"the job {state}")
    try:
        await _write_journal(job, drain, job.progress.step, ())
        await save(job, drain, wait=True)
    except Stopped:
        if not job.control.stopping:
            raise
        cause = ": ".join(filter(None, (cause, f"its end could not be saved: {job.control.no_space}")))
    await _finish(job, state, cause)


async def _finish(job: JobContext, state: JobState, cause: str) -> None:
    """Ends the job. The state comes last: a head that dies before that is restarted, and ends the job again."""
    await job.store.update(**job.buffer.ledger.accounts())
    await job.store.retire()
    await job.store.transition(state, allowed=LIVE, cause=cause)
