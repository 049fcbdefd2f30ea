"""Monitor loop: deadlines, requests of users, complete evaluations, and stalls with their reason.

no progress ─► stalled, with the reason ─► no step is possible ─► the train loop ends the job as failed
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from typing import Any

from services.common.errors import JobConflict
from services.common.jobs import deaths as job_deaths
from services.common.jobs.record import LIVE, JobRecord, JobState
from services.common.service import heartbeat
from services.common.service.heartbeat import WorkerKind
from services.common.service.lifecycle import Drain
from services.learner.loops import metrics
from services.learner.loops.issue import reissue_overdue
from services.learner.loops.server_deaths import DeathCount
from services.learner.loops.state import CANCELLED, JobContext

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.5
ACCOUNTS_INTERVAL_S = 1.5
STALLED_AFTER_S = 60.0
"""A longer wait, in which no group arrives and no worker makes progress, is a stall; its reason is reported."""


async def monitor_loop(job: JobContext, drain: Drain) -> None:
    """Monitors the job.

    consumes:     clock, job record, deaths of its servers
    waits for:    the next poll, every POLL_INTERVAL_S
    unblocked by: time
    produces:     reissued tasks, evaluations, the record's accounts, `stalled` and `running`, the verdict that no step is possible
    """
    stalled, reported_at, deaths = False, -math.inf, DeathCount()
    while not await drain.wait(POLL_INTERVAL_S):
        job.publisher.check()
        record = await _apply_requests(job)
        metrics.observe_buffer(job.buffer)
        if job.progress.published and time.monotonic() - reported_at > ACCOUNTS_INTERVAL_S:
            reported_at = time.monotonic()
            ledger = job.buffer.ledger
            if record.groups != ledger.summary() or record.failure != ledger.newest_failure:
                await job.store.update_in_redis(**ledger.accounts())
        if job.control.paused:
            deaths = DeathCount()
            continue  # the train loop reports the pause, no deadline runs, and no progress is expected
        await reissue_overdue(job)
        await _close_evaluations(job)
        cause = await _stall_cause(job)
        if stalled and job.steps_left and job.buffer.no_step_reason:
            job.give_up(f"no step is possible: {job.buffer.no_step_reason}")
        elif verdict := await _server_verdict(job, deaths):
            job.give_up(verdict)
        if cause and not stalled:
            log.warning("stalled: %s", cause)
            stalled = await _transition(job, JobState.STALLED, cause)
        elif stalled and not cause:
            stalled = not await _transition(job, JobState.RUNNING, "")


async def _apply_requests(job: JobContext) -> JobRecord:
    record = await job.store.record()
    if record.cancel_requested and not job.control.stopping:
        job.control.stopping = CANCELLED
        job.activity.moved()
    if record.pause_requested and not job.control.paused:
        job.control.pause()
        job.activity.moved()
    elif job.control.paused and not (record.pause_requested or job.control.no_space):
        job.resume()
    return record


async def _stall_cause(job: JobContext) -> str:
    """Why the job makes no progress; empty while it does, or while a step is in progress."""
    if not job.activity.waiting_for:
        return ""
    if job.steps_left and job.buffer.stall_reason:
        return job.buffer.stall_reason
    still = time.monotonic() - job.activity.moved_at
    if still > STALLED_AFTER_S:
        # Progress within a group counts too: at a rollout server of the job, or at a reward service.
        for status in await heartbeat.live_workers(job.redis):
            if status.progress_age_s is not None and (status.job_id == job.job_id or status.kind is WorkerKind.REWARD):
                still = min(still, status.progress_age_s)
    return await _describe_wait(job, still) if still > STALLED_AFTER_S else ""


async def _server_verdict(job: JobContext, count: DeathCount) -> str:
    """Why the job's servers do not stay alive; empty while they do, or while one of them samples."""
    if not job.progress.published:
        return ""
    own = job.settings.worker_name("learner")
    found = await job_deaths.deaths(job.redis, job.job_id)
    count.update([death for death in found if not death.worker.startswith(own)], job.activity.arrived)
    if not count.verdict:
        return ""
    servers = [s for s in await heartbeat.live_workers(job.redis) if (s.job_id, s.state) == (job.job_id, "sampling")]
    sampling = any(s.progress_age_s is not None and s.progress_age_s < STALLED_AFTER_S for s in servers)
    return "" if sampling else count.verdict


async def _close_evaluations(job: JobContext) -> None:
    for evaluation in [evaluation for evaluation in job.evals.rounds if evaluation.done(job.evals.answers)]:
        result = evaluation.result(job.evals.answers)
        if failure := evaluation.failure(job.evals.answers):
            log.warning("evaluation at step %d: %s", evaluation.step, failure)
            result["failure"] = failure
        await job.store.append_eval(result)
        await _keep_best(job, result)
        metrics.observe_evaluation(result)
        answers = [job.evals.answers.pop(group_id, None) for group_id in evaluation.group_ids]
        await job.consumer.ack(*(judged.entry for judged in answers if judged is not None and judged.entry is not None))
        job.evals.rounds.remove(evaluation)
        job.activity.moved()


async def _keep_best(job: JobContext, result: Mapping[str, Any]) -> None:
    """Keeps the score in the job's record if it is the best one so far."""
    score, error = result["avg_at_k"], result["avg_at_k_se"]
    best = (await job.store.record()).best_score
    if score is not None and (best is None or score > best):
        await job.store.update(best_score=score, best_score_se="" if error is None else error)


async def _describe_wait(job: JobContext, still_s: float) -> str:
    alive = await heartbeat.live_workers(job.redis)
    kinds = [status.kind for status in alive]
    counts = f"{kinds.count(WorkerKind.ROLLOUT)} rollout servers and {kinds.count(WorkerKind.REWARD)} reward services"
    if job.spec.environment is not None:
        counts += f" and {kinds.count(WorkerKind.ENVIRONMENT)} environment servers"
    troubles = [str(status.detail["trouble"]) for status in alive if "trouble" in status.detail]
    return "; ".join([f"waiting for {job.activity.waiting_for} for {still_s:.0f} s", f"{counts} alive", *troubles])


async def _transition(job: JobContext, to: JobState, cause: str) -> bool:
    try:
        await job.store.transition(to, allowed=LIVE, cause=cause)
    except JobConflict:
        return False
    return True
