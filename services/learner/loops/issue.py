"""The issue loop: keeps the slots full, so that rollout servers always have work and no sample can grow too old."""

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

LOOK_AGAIN_S = 1.0


async def issue_loop(job: JobContext, drain: Drain) -> None:
    """Issues training tasks, the slower the more groups have failed in a row.

    consumes:     free slots
    waits for:    a slot (`issue_now`), at most a second at a time; while the job is paused, its resumption; after failures, a moment
    unblocked by: a fate, a published step
    produces:     tasks stream
    """
    await job.progress.recovered(drain)
    while not drain.requested:
        if job.activity.ask_again and not job.control.paused:
            job.activity.ask_again = False
            await ask_again(job)
        while (
            not (job.control.stopping or job.control.hopeless or job.control.paused)
            and job.intake.budget(job.steps_left) > 0
        ):
            group = job.intake.ledger.issue(job.progress.step)
            if await ask(job, group) is Sent.BEFORE:
                # It was sent before a crash, at a version that the journal's last step may have been trained with.
                group.issue_version = max(0, job.progress.recovered_step - 1)
            if job.intake.failures.count and await drain.wait(job.intake.failures.pause_s):
                return
        await wait_event(job.activity.issue_now, LOOK_AGAIN_S)


async def ask_again(job: JobContext) -> None:
    """Asks again for everything that has no fate yet and has not arrived; what is in a stream already stays there once."""
    for group in list(job.intake.ledger.active.values()):
        if group.ready:
            continue
        version = job.progress.step
        if await ask(job, group) is Sent.NOW:
            group.issue_version = version  # nobody has it from before
    for evaluation in list(job.evals.rounds):
        for index, group_id in enumerate(evaluation.group_ids):
            if group_id not in job.evals.answers:
                await ask_held_out(job, evaluation, index)


async def reissue_overdue(job: JobContext) -> None:
    """Asks again for groups whose attempt failed or is beyond its deadline, or fails them after the last attempt.

    Groups that nobody was there to answer say nothing about the job: they do not count as failures in a row.
    """
    served: bool | None = None
    for group in job.intake.overdue():
        if group.attempt >= job.spec.rollout.max_attempts:
            cause = group.failure or f"no verdict within {job.spec.rollout.group_timeout_s:.0f} s"
            reason = f"{cause} (attempt {group.attempt} of {job.spec.rollout.max_attempts})"
            if served is None:
                served = await _is_served(job)
            job.intake.give_up(group, reason, counts=bool(group.failure) or served)
            await job.store.event("group_failed", {"group_id": group.group_id, "message": reason})
            job.activity.moved()
            continue
        group.attempt, group.failure = group.attempt + 1, ""
        group.issued_at = time.monotonic()
        await ask(job, group)


async def _is_served(job: JobContext) -> bool:
    """Whether a rollout server of the job's and a reward service are alive."""
    alive = await heartbeat.alive(job.redis)
    serves = any(status.kind is WorkerKind.ROLLOUT and status.job_id == job.job_id for status in alive)
    return serves and any(status.kind is WorkerKind.REWARD for status in alive)


async def start_evaluation(job: JobContext) -> EvalRound:
    """Asks every held-out task of the policy as it is now, or newer."""
    tasks = job.tasks.held_out_tasks
    first_id = job.progress.step * tasks
    deadline = time.monotonic() + job.spec.eval.timeout_s
    evaluation = EvalRound(job.progress.step, first_id, tasks, job.spec.eval.samples, deadline)
    job.evals.rounds.append(evaluation)
    for index in range(tasks):
        await ask_held_out(job, evaluation, index)
    return evaluation


class Sent(Enum):
    """What became of a task."""

    NOW = auto()
    BEFORE = auto()
    """It is in the stream already."""
    NOT = auto()
    """It could not be made, or is too large for the stream."""


async def ask(job: JobContext, group: ActiveGroup) -> Sent:
    """Asks a training group of the policy as it is now; one whose task cannot be made fails. The job ends where no task can be made."""
    try:
        task = await job.tasks.training(group.group_id, group.attempt, job.progress.step)
        return Sent.NOW if await send(job, task) else Sent.BEFORE
    except (TaskNotMade, EntryError) as error:
        job.intake.give_up(group, str(error))
        job.activity.moved()
    except DataError as error:
        job.give_up(f"no step is possible: {error}")
    return Sent.NOT


async def ask_held_out(job: JobContext, evaluation: EvalRound, index: int) -> None:
    """Asks a held-out task; as `ask`."""
    group_id = evaluation.first_id + index
    try:
        await send(job, await job.tasks.evaluation(group_id, index, attempt=1, policy_version=evaluation.step))
    except (TaskNotMade, EntryError) as error:
        evaluation.not_asked[group_id] = str(error)
    except DataError as error:
        job.give_up(f"no step is possible: {error}")


async def send(job: JobContext, task: Task) -> bool:
    """Adds a task to the stream once, waiting while it is full; False when it had been added before.

    Raises:
        EntryError: it is too large for the stream.
    """
    payload = encode(task)
    while True:
        try:
            return await stream.add(job.redis, job.job_id, Stage.TASKS, task.member, payload, fence=job.store.fence)
        except StreamFull:
            await asyncio.sleep(LOOK_AGAIN_S)
