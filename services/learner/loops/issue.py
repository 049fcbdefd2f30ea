"""Issue loop: keeps the slots full, so that rollout servers always have work and no sample becomes too old."""

from __future__ import annotations

import asyncio
import time
from enum import Enum, auto

from services.common.errors import DataError, EntryError, StreamFull
from services.common.redis.keys import Stage
from services.common.service import heartbeat
from services.common.service.heartbeat import WorkerKind
from services.common.service.lifecycle import Drain
from services.common.streams import stream
from services.common.streams.codec import encode
from services.common.streams.types import Task
from services.learner.groups.data import TaskNotMade
from services.learner.groups.evaluation import EvalRound
from services.learner.groups.ledger import ActiveGroup
from services.learner.loops.state import JobContext, wait_event

POLL_INTERVAL_S = 1.0
AT_ONCE = 64
"""Most tasks that are sent together: one write to Redis for all."""


async def issue_loop(job: JobContext, drain: Drain) -> None:
    """Issues training tasks; the more groups have failed in a row, the slower.

    consumes:     free slots
    waits for:    a slot or the end of a pause (`issue_now`), POLL_INTERVAL_S at a time; after failures, `pause_s`
    unblocked by: a fate, a published step, the end of a pause
    produces:     tasks stream
    """
    await job.progress.recovered(drain)
    while not drain.requested:
        if job.activity.resend and not job.control.paused:
            job.activity.resend = False
            await _resend(job)
        while (
            not (job.control.stopping or job.control.hopeless or job.control.paused)
            and job.buffer.budget(job.steps_left) > 0
        ):
            count = 1 if job.buffer.failures.count else min(AT_ONCE, job.buffer.budget(job.steps_left))
            groups = [job.buffer.ledger.issue(job.progress.step) for _ in range(count)]
            await asyncio.gather(*(_issue(job, group) for group in groups))
            if job.buffer.failures.count and await drain.wait(job.buffer.failures.pause_s):
                return
        await wait_event(job.activity.issue_now, POLL_INTERVAL_S)


async def _issue(job: JobContext, group: ActiveGroup) -> None:
    job.traces.issued(job.job_id, group.group_id)
    if await _send_training(job, group) is Sent.BEFORE:
        # It was sent before a crash, perhaps at the version before the journal's last step.
        group.issue_version = max(0, job.progress.recovered_step - 1)


async def _resend(job: JobContext) -> None:
    """Sends again all tasks without a fate whose group has not arrived; a task that is still in the stream is not added twice."""
    for group in list(job.buffer.ledger.active.values()):
        if group.ready:
            continue
        version = job.progress.step
        if await _send_training(job, group) is Sent.NOW:
            group.issue_version = version  # no server has it from before
    for evaluation in list(job.evals.rounds):
        for index, group_id in enumerate(evaluation.group_ids):
            if group_id not in job.evals.answers:
                await _send_held_out(job, evaluation, index)


async def reissue_overdue(job: JobContext) -> None:
    """Sends the next attempt of groups whose attempt failed or passed its deadline; fails them after the last attempt.

    Groups that no server was there to answer do not count as failures in a row: they are no sign of an error in the job.
    """
    served: bool | None = None
    for group in job.buffer.overdue():
        if group.attempt >= job.spec.rollout.max_attempts:
            cause = group.failure or f"no verdict within {job.spec.rollout.group_timeout_s:.0f} s"
            reason = f"{cause} (attempt {group.attempt} of {job.spec.rollout.max_attempts})"
            if served is None:
                served = await _is_served(job)
            # An environment server that is not there is a failure that the rollout server reports.
            reported = bool(group.failure) and job.spec.environment is None
            job.buffer.give_up(group, reason, counts=reported or served)
            await job.store.event("group_failed", {"group_id": group.group_id, "message": reason})
            job.activity.moved()
            continue
        group.attempt, group.failure = group.attempt + 1, ""
        group.issued_at = time.monotonic()
        await _send_training(job, group)


async def _is_served(job: JobContext) -> bool:
    """Whether a rollout server of the job, a reward service and, if the job plays episodes, an environment server are alive."""
    alive = await heartbeat.live_workers(job.redis)
    there = {each.kind for each in alive if each.kind is not WorkerKind.ROLLOUT or each.job_id == job.job_id}
    needed = {WorkerKind.ROLLOUT, WorkerKind.REWARD}
    return needed | ({WorkerKind.ENVIRONMENT} if job.spec.environment is not None else set()) <= there


async def start_evaluation(job: JobContext) -> EvalRound:
    """Begins an evaluation of the current policy, or a newer one: sends every held-out task."""
    tasks = job.tasks.data.held_out_tasks
    first_id = job.progress.step * tasks
    deadline = time.monotonic() + job.spec.eval.timeout_s
    evaluation = EvalRound(job.progress.step, first_id, tasks, job.spec.eval.samples, deadline)
    job.evals.rounds.append(evaluation)
    for first in range(0, tasks, AT_ONCE):
        indices = range(first, min(first + AT_ONCE, tasks))
        await asyncio.gather(*(_send_held_out(job, evaluation, index) for index in indices))
    return evaluation


class Sent(Enum):
    """Outcome of sending a task."""

    NOW = auto()
    BEFORE = auto()
    """It is in the stream already."""
    NOT = auto()
    """It could not be made, or is too large for the stream."""


async def _send_training(job: JobContext, group: ActiveGroup) -> Sent:
    """Sends a training group's task for the current policy. The group fails if its task cannot be made; the job if no task can be."""
    try:
        task = await job.tasks.training(group.group_id, group.attempt, job.progress.step)
        return Sent.NOW if await _send(job, task) else Sent.BEFORE
    except (TaskNotMade, EntryError) as error:
        job.buffer.give_up(group, str(error))
        job.activity.moved()
    except DataError as error:
        job.give_up(f"no step is possible: {error}")
    return Sent.NOT


async def _send_held_out(job: JobContext, evaluation: EvalRound, index: int) -> None:
    """The same for a held-out task, which stays unanswered if it cannot be made."""
    group_id = evaluation.first_id + index
    try:
        await _send(job, await job.tasks.evaluation(group_id, index, evaluation.step))
    except (TaskNotMade, EntryError) as error:
        evaluation.not_sent[group_id] = str(error)
    except DataError as error:
        job.give_up(f"no step is possible: {error}")


async def _send(job: JobContext, task: Task) -> bool:
    """Adds a task to the stream once, waiting while it is full; False if added before. EntryError for a task that is too large."""
    payload = encode(task, job.consumer.limit_bytes)
    while True:
        try:
            return await stream.add(job.redis, job.job_id, Stage.TASKS, task.member, payload, fence=job.store.fence)
        except StreamFull:
            await asyncio.sleep(POLL_INTERVAL_S)
