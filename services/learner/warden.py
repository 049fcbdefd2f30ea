"""The watch loop: deadlines, what people ask of the job, evaluations that are complete, and a job that stands still says why."""

from __future__ import annotations

import math
import time

from services.common import workers
from services.common.errors import JobConflict
from services.common.job_records import LIVE, JobState
from services.common.lifecycle import Drain
from services.common.workers import WorkerKind
from services.learner import metrics
from services.learner.context import JobContext
from services.learner.issuer import reissue_overdue

PERIOD_S = 0.5
STALLED_AFTER_S = 60.0
"""A wait longer than this, while nothing arrives and nobody works on what should, is a stall, and gets a name."""


async def watch_loop(job: JobContext, drain: Drain) -> None:
    """Looks after the job.

    consumes:     clock, job record
    waits for:    the next look, every half second
    unblocked by: time
    produces:     reissued tasks, evaluations, the states `stalled` and `running`
    """
    stalled = False
    while not await drain.wait(PERIOD_S):
        await _notice_requests(job)
        metrics.observe_intake(job.intake)
        if job.paused:
            continue  # the step loop says so, no deadline runs, and standing still is what was asked for
        await reissue_overdue(job)
        await _close_evaluations(job)
        still = time.monotonic() - job.progress_at
        if job.waiting_for and still > STALLED_AFTER_S:
            still = min(still, await _work_age_s(job))
        if job.waiting_for and not stalled and still > STALLED_AFTER_S:
            stalled = await _move(job, JobState.STALLED, await _name_the_wait(job, still))
        elif stalled and still <= STALLED_AFTER_S:
            stalled = not await _move(job, JobState.RUNNING, "")


async def _notice_requests(job: JobContext) -> None:
    record = await job.store.get(job.job_id)
    if record.cancel_requested and not job.stopping:
        job.stopping = "cancelled on request"
        job.moved()
    if record.pause_requested and not job.paused:
        job.pause()
        job.moved()
    elif job.paused and not (record.pause_requested or job.no_space):
        job.resume()


async def _close_evaluations(job: JobContext) -> None:
    for evaluation in [evaluation for evaluation in job.rounds if evaluation.done(job.answers)]:
        result = evaluation.result(job.answers)
        await job.store.append_eval(job.job_id, result)
        metrics.observe_evaluation(result)
        answers = [job.answers.pop(group_id) for group_id in evaluation.group_ids if group_id in job.answers]
        await job.consumer.ack(*(judged.entry for judged in answers if judged.entry is not None))
        job.rounds.remove(evaluation)
        job.moved()


async def _work_age_s(job: JobContext) -> float:
    """Seconds since the job's work last moved at any of its rollout servers or a reward service; infinite when nobody has any in hand."""
    ages = [
        status.progress_age_s
        for status in await workers.alive(job.redis)
        if status.progress_age_s is not None and (status.job_id == job.job_id or status.kind is WorkerKind.REWARD)
    ]
    return min(ages, default=math.inf)


async def _name_the_wait(job: JobContext, still_s: float) -> str:
    alive = await workers.alive(job.redis)
    kinds = [status.kind for status in alive]
    counts = (
        f"{kinds.count(WorkerKind.ROLLOUT)} rollout servers and {kinds.count(WorkerKind.REWARD)} reward services alive"
    )
    troubles = [str(status.detail["trouble"]) for status in alive if "trouble" in status.detail]
    return "; ".join([f"waiting for {job.waiting_for} for {still_s:.0f} s", counts, *troubles])


async def _move(job: JobContext, to: JobState, cause: str) -> bool:
    try:
        await job.store.transition(job.job_id, to, allowed=LIVE, cause=cause)
    except JobConflict:
        return False
    return True
