"""The watch loop: deadlines, what people ask of the job, evaluations that are complete, and a job that stands still says why.

no progress ─► stalled, with the reason ─► no step is possible ─► the step loop ends the job as failed
"""

from __future__ import annotations

import logging
import math
import time

from services.common.errors import JobConflict
from services.common.jobs import deaths as job_deaths
from services.common.jobs.record import LIVE, JobRecord, JobState
from services.common.service import heartbeat
from services.common.service.heartbeat import WorkerKind
from services.common.service.lifecycle import Drain
from services.learner.loops import metrics
from services.learner.loops.issue import reissue_overdue
from services.learner.loops.server_deaths import DeathCount
from services.learner.loops.state import JobContext

log = logging.getLogger(__name__)

PERIOD_S = 0.5
LIVE_S = 1.5
"""The record's accounts are at most so old, and a look."""
STALLED_AFTER_S = 60.0
"""A wait longer than this, while nothing arrives and nobody works on what should, is a stall, and gets a name."""


async def watch_loop(job: JobContext, drain: Drain) -> None:
    """Looks after the job.

    consumes:     clock, job record, deaths of its servers
    waits for:    the next look, every half second
    unblocked by: time
    produces:     reissued tasks, evaluations, the record's accounts, `stalled` and `running`, the verdict that no step is possible
    """
    stalled, told_at, deaths = False, -math.inf, DeathCount()
    while not await drain.wait(PERIOD_S):
        record = await _notice_requests(job)
        metrics.observe_intake(job.intake)
        if job.progress.published and time.monotonic() - told_at > LIVE_S:
            told_at = time.monotonic()
            await _tell(job, record)
        if job.control.paused:
            deaths = DeathCount()
            continue  # the step loop says so, no deadline runs, and standing still is what was asked for
        await reissue_overdue(job)
        await _close_evaluations(job)
        cause = await _standstill(job)
        if stalled and job.steps_left and job.intake.hopeless:
            job.give_up(f"no step is possible: {job.intake.hopeless}")
        elif verdict := await _servers_die(job, deaths):
            job.give_up(verdict)
        if cause and not stalled:
            log.warning("stalled: %s", cause)
            stalled = await _move(job, JobState.STALLED, cause)
        elif stalled and not cause:
            stalled = not await _move(job, JobState.RUNNING, "")


async def _notice_requests(job: JobContext) -> JobRecord:
    record = await job.store.record()
    if record.cancel_requested and not job.control.stopping:
        job.control.stopping = "cancelled on request"
        job.activity.moved()
    if record.pause_requested and not job.control.paused:
        job.control.pause()
        job.activity.moved()
    elif job.control.paused and not (record.pause_requested or job.control.no_space):
        job.resume()
    return record


async def _tell(job: JobContext, record: JobRecord) -> None:
    """Brings the record's accounts up to date, where they are not."""
    ledger = job.intake.ledger
    if record.groups != ledger.summary() or record.failure != ledger.newest_failure:
        await job.store.note(**ledger.accounts())


async def _standstill(job: JobContext) -> str:
    """Why the job stands still; empty while it does not, or a step is under way."""
    if not job.activity.waiting_for:
        return ""
    if job.steps_left and job.intake.fruitless:
        return job.intake.fruitless
    still = time.monotonic() - job.activity.moved_at
    if still > STALLED_AFTER_S:
        still = min(still, await _work_age_s(job))
    return await _name_the_wait(job, still) if still > STALLED_AFTER_S else ""


async def _servers_die(job: JobContext, count: DeathCount) -> str:
    """Why the job's servers do not stay alive; empty while they do, or while one of them samples."""
    if not job.progress.published:
        return ""
    own = job.settings.worker_name("learner")
    found = await job_deaths.deaths(job.redis, job.job_id)
    count.look([death for death in found if not death.worker.startswith(own)], job.activity.arrived)
    return "" if not count.verdict or await _one_samples(job) else count.verdict


async def _one_samples(job: JobContext) -> bool:
    """Whether a rollout server has groups of the job in hand, and they move."""
    return any(
        status.job_id == job.job_id
        and status.state == "sampling"
        and status.progress_age_s is not None
        and status.progress_age_s < STALLED_AFTER_S
        for status in await heartbeat.alive(job.redis)
    )


async def _close_evaluations(job: JobContext) -> None:
    for evaluation in [evaluation for evaluation in job.evals.rounds if evaluation.done(job.evals.answers)]:
        result = evaluation.result(job.evals.answers)
        if failure := evaluation.failure(job.evals.answers):
            log.warning("evaluation at step %d: %s", evaluation.step, failure)
            result["failure"] = failure
        await job.store.append_eval(result)
        metrics.observe_evaluation(result)
        answers = [
            job.evals.answers.pop(group_id) for group_id in evaluation.group_ids if group_id in job.evals.answers
        ]
        await job.consumer.ack(*(judged.entry for judged in answers if judged.entry is not None))
        job.evals.rounds.remove(evaluation)
        job.activity.moved()


async def _work_age_s(job: JobContext) -> float:
    """Seconds since the job's work last moved at any of its rollout servers or a reward service; infinite when nobody has any in hand."""
    ages = [
        status.progress_age_s
        for status in await heartbeat.alive(job.redis)
        if status.progress_age_s is not None and (status.job_id == job.job_id or status.kind is WorkerKind.REWARD)
    ]
    return min(ages, default=math.inf)


async def _name_the_wait(job: JobContext, still_s: float) -> str:
    alive = await heartbeat.alive(job.redis)
    kinds = [status.kind for status in alive]
    counts = (
        f"{kinds.count(WorkerKind.ROLLOUT)} rollout servers and {kinds.count(WorkerKind.REWARD)} reward services alive"
    )
    troubles = [str(status.detail["trouble"]) for status in alive if "trouble" in status.detail]
    return "; ".join([f"waiting for {job.activity.waiting_for} for {still_s:.0f} s", counts, *troubles])


async def _move(job: JobContext, to: JobState, cause: str) -> bool:
    try:
        await job.store.transition(to, allowed=LIVE, cause=cause)
    except JobConflict:
        return False
    return True
