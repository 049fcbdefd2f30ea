"""The learner's main course, step by step.

recover ─► publish ─► evaluate ─► ┌─ next batch ─► journal ─► ack ─► train ─► publish ─► record ─► checkpoint? ─┐ ─► evaluate ─► end
                                  └──────────────────────────────────────────────────────────────────────────────┘

A paused job holds between two steps, or where it waits; what was under way comes in meanwhile.
"""

from __future__ import annotations

import json
import logging
import time

from services.common.codec import decode
from services.common.jobs import LIVE, PAUSED_CAUSE, ActiveJob, JobState
from services.common.lifecycle import Drain
from services.common.types import ScoredGroup
from services.learner import metrics
from services.learner.assemble import assemble
from services.learner.context import Flow, JobContext, wait_event
from services.learner.intake import Judged
from services.learner.issuer import start_evaluation
from services.learner.journal import BatchRecord
from services.learner.ledger import Ledger
from services.learner.records import StepTimes, step_record
from services.learner.snapshots import make_snapshot

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 1.0


class Stopped(Exception):  # noqa: N818  control flow, not an error
    """The job was asked to end, or the learner to drain."""


async def step_loop(job: JobContext, drain: Drain) -> None:
    """Runs the job from where it stands to its end.

    consumes:     ready groups
    waits for:    a batch, an evaluation; a second at a time, and the warden names what is missing
    unblocked by: the collect loop
    produces:     weights, step records, checkpoints
    """
    try:
        await _begin(job, drain)
        if job.step == 0:
            await _evaluate(job, drain)
        while job.steps_left:
            await _step(job, drain)
        await _evaluate(job, drain)
        await _end(job, JobState.SUCCEEDED, "")
    except Stopped:
        if job.stopping:
            await _end(job, JobState.CANCELLED, job.stopping)
    await job.ranks.finish()
    drain.request()


async def recover(job: JobContext) -> None:
    """Brings ranks and ledger to where the journal ends: the newest checkpoint, then the same batches in the same order."""
    checkpoint = job.checkpoints.newest()
    if checkpoint is not None:
        log.info("resuming from the checkpoint of step %d", checkpoint.step)
        await job.ranks.load(checkpoint.path)
        job.step = job.saved_step = checkpoint.step
        job.intake.ledger = Ledger.restore(checkpoint.state["ledger"])
    for record in job.journal.records(after_step=job.step):
        await _replay(job, record)
    job.recovered_step = job.step
    oldest = max(0, job.step - job.spec.off_policy.max_off_policy_steps)
    for group in job.intake.ledger.active.values():
        group.issue_version = oldest


async def _replay(job: JobContext, record: BatchRecord) -> None:
    """Trains a journalled batch again; its step goes into the history if it did not before, marked as replayed."""
    log.info("training step %d again from the journal", record.step)
    job.intake.ledger.replay(record.issued, list(record.settled))
    groups = [Judged(decode(ScoredGroup, payload), payload, None) for payload in record.groups]
    job.flow = Flow()
    for judged in groups:
        job.flow.take(judged.scored)
    started = time.monotonic()
    sequences, ages = assemble(groups, job.spec), _ages(job, groups)
    stats = await job.ranks.train(record.step, sequences)
    job.step = record.step
    seconds = time.monotonic() - started
    times = StepTimes(wait_s=0.0, train_s=seconds, step_s=seconds)
    await job.store.append_step(
        job.job_id, job.step, step_record(job, groups, ages, stats, times, sequences) | {"replayed": True}
    )
    job.flow = Flow()


async def _begin(job: JobContext, drain: Drain) -> None:
    record = await job.store.get(job.job_id)
    if record.state.ended:
        raise Stopped  # these ranks were started again after the end
    if record.pause_requested:
        job.pause()
    metrics.observe_job(job.job_id, slots=job.spec.slots, ranks=job.spec.learner.world_size)
    await recover(job)
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
    if job.saved_step != job.step:
        await _checkpoint(job)
    await job.store.update(job.job_id, groups=json.dumps(job.intake.ledger.summary()))
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
    ages = _ages(job, groups)
    await _journal(job, groups)
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
    record = step_record(job, groups, ages, stats, times, sequences)
    job.flow = Flow()
    await job.store.update(
        job.job_id, step=job.step, policy_version=job.step, groups=json.dumps(job.intake.ledger.summary())
    )  # fmt: skip
    await job.store.append_step(job.job_id, job.step, record)
    metrics.observe_step(record, ages)
    await hold(job, drain)
    every = job.spec.eval.interval_steps
    if job.spec.eval.enabled and every and job.step % every == 0 and job.steps_left:
        await start_evaluation(job)
    if job.step % job.spec.checkpoint.interval_steps == 0 and job.steps_left and job.saved_step != job.step:
        await _checkpoint(job)
    job.moved()


def _ages(job: JobContext, groups: list[Judged]) -> list[int]:
    """policy_age of each group, at consumption."""
    return [job.step - judged.scored.group.min_policy_version for judged in groups]


async def _next_batch(job: JobContext, drain: Drain) -> list[Judged] | None:
    """The groups of the next step, or None when the job was paused before they were there."""
    job.waiting_for = "scored groups"
    while True:
        if job.stopping or drain.requested:
            raise Stopped
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


async def _journal(job: JobContext, groups: list[Judged]) -> None:
    """Makes the batch durable, and only then lets its entries go."""
    job.intake.begin_training(groups)
    ledger = job.intake.ledger
    record = BatchRecord(
        job.step + 1,
        job.lineage,
        tuple(judged.payload for judged in groups),
        tuple(ledger.take_unwritten()),
        ledger.issued,
    )
    metrics.JOURNAL_BYTES.inc(job.journal.append(record))
    await job.consumer.ack(*(judged.entry for judged in job.intake.take_settled() if judged.entry is not None))


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


async def _checkpoint(job: JobContext) -> None:
    """Saves what a restart needs, and the weights in Hugging Face format."""
    started = time.monotonic()
    path = job.checkpoints.begin(job.step)
    await job.ranks.save(path, export=job.spec.checkpoint.export)
    state = {"lineage": job.lineage, "ledger": job.intake.ledger.state()}
    final = job.checkpoints.commit(job.step, state)
    job.saved_step = job.step
    if job.spec.checkpoint.export:
        await job.store.update(job.job_id, export=str(final / "hf"))
    await job.store.event(job.job_id, "checkpoint", {"step": job.step, "path": str(final)})
    metrics.CHECKPOINT_SECONDS.observe(time.monotonic() - started)


async def _evaluate(job: JobContext, drain: Drain) -> None:
    """Evaluates the policy as it is and waits for the end; the warden writes the result down. Nothing to do if it was before a restart."""
    if not job.spec.eval.enabled or job.step in await job.store.evaluated_steps(job.job_id):
        return
    await hold(job, drain)
    evaluation = await start_evaluation(job)
    job.waiting_for = f"the evaluation at step {evaluation.step}"
    while evaluation in job.rounds:
        if job.stopping or drain.requested:
            raise Stopped
        await hold(job, drain)
        await wait_event(job.step_now, LOOK_AGAIN_S)
    job.waiting_for = ""


async def _end(job: JobContext, state: JobState, cause: str) -> None:
    """Gives every group that is left its fate, saves, and ends the job."""
    job.intake.cancel_all(f"the job {state}")
    await _checkpoint(job)
    await job.store.update(job.job_id, groups=json.dumps(job.intake.ledger.summary()))
    await job.store.transition(job.job_id, state, allowed=LIVE, cause=cause)
    await job.store.retire(job.job_id)
