"""The issue loop: keeps the slots full, so that rollout servers always have work and no sample can grow too old."""

from __future__ import annotations

import asyncio
import time

from services.common import streams
from services.common.codec import encode
from services.common.errors import StreamFull
from services.common.keys import Stage
from services.common.lifecycle import Drain
from services.common.types import Task
from services.learner.context import JobContext, wait_event
from services.learner.evaluation import EvalRound
from services.learner.ledger import Fate

LOOK_AGAIN_S = 1.0


async def issue_loop(job: JobContext, drain: Drain) -> None:
    """Issues training tasks.

    consumes:     free slots
    waits for:    a slot (`issue_now`), at most a second at a time; while the job is paused, its resumption
    unblocked by: a fate, a published step
    produces:     tasks stream
    """
    await job.recovered(drain)
    if await job.resumed(drain):
        # A recovered job: what has no fate yet is asked for again.
        for group in list(job.intake.ledger.active.values()):
            await send(job, job.tasks.training(group.group_id, group.attempt, job.step))
    while not drain.requested:
        while not (job.stopping or job.paused) and job.intake.budget(job.steps_left) > 0:
            group = job.intake.ledger.issue(job.step)
            if not await send(job, job.tasks.training(group.group_id, group.attempt, job.step)):
                # It was sent before a crash, at a version that the journal's last step may have been trained with.
                group.issue_version = max(0, job.recovered_step - 1)
        await wait_event(job.issue_now, LOOK_AGAIN_S)


async def reissue_overdue(job: JobContext) -> None:
    """Asks again for groups beyond their deadline, or fails them after the last attempt."""
    for group in job.intake.overdue():
        if group.attempt >= job.spec.rollout.max_attempts:
            reason = f"no verdict within {job.spec.rollout.group_timeout_s:.0f} s, {group.attempt} times"
            job.intake.ledger.settle(group.group_id, Fate.FAILED, reason)
            await job.store.event(job.job_id, "group_failed", {"group_id": group.group_id, "message": reason})
            job.moved()
            continue
        group.attempt += 1
        group.issued_at = time.monotonic()
        await send(job, job.tasks.training(group.group_id, group.attempt, job.step))


async def start_evaluation(job: JobContext) -> EvalRound:
    """Asks every held-out task of the policy as it is now, or newer."""
    tasks = job.tasks.held_out_tasks
    first_id = job.step * tasks
    deadline = time.monotonic() + job.spec.eval.timeout_s
    evaluation = EvalRound(job.step, first_id, tasks, job.spec.eval.samples, deadline)
    job.rounds.append(evaluation)
    for index in range(tasks):
        await send(job, job.tasks.evaluation(first_id + index, index, attempt=1, policy_version=job.step))
    return evaluation


async def send(job: JobContext, task: Task) -> bool:
    """Adds a task to the stream once, waiting while it is full; False when it had been added before."""
    payload = encode(task)
    while True:
        try:
            return await streams.add(job.redis, job.job_id, Stage.TASKS, task.member, payload)
        except StreamFull:
            await asyncio.sleep(LOOK_AGAIN_S)
