"""Checkpoints beside the training: training waits only for a copy; the files are written while the next steps are trained.

between two steps:  space? ─► directory ─► ranks copy to host memory        then:  ranks write, hash, fsync ─► commit (a thread) ─► event
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from services.common.checkpoints.manifest import EXPORT, manifest_digest
from services.common.checkpoints.origin import NAMES_PLACES
from services.common.jobs.record import LIVE, JobState
from services.common.service.lifecycle import Drain
from services.learner.loops import metrics
from services.learner.loops.state import JobContext, Stopped
from services.learner.storage.folder import is_full

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.1
SPACE_RETRY_S = 2.0

T = TypeVar("T")


async def save_if_due(job: JobContext, drain: Drain) -> None:
    """Begins a checkpoint when a multiple of the interval has passed since the last; one in progress defers it to the next step.

    A write that failed for lack of space is repeated here, and the job waits for it.
    """
    if job.saving.task is not None and not job.saving.task.done():
        return
    failed = job.saving.task is not None and job.saving.task.exception() is not None
    every = job.spec.checkpoint.interval_steps
    due = job.steps_left > 0 and job.progress.step // every > job.saving.begun_step // every
    if failed or due:
        await save(job, drain, wait=False)


async def save(job: JobContext, drain: Drain, *, wait: bool) -> None:
    """Saves the job's state between two steps, unless it is saved; `wait`: until it is written, otherwise only until it is copied.

    Raises:
        Stopped: the job was cancelled, or the learner drains, while there was no space.
    """

    async def attempt() -> None:
        await _wait_saved(job)
        if job.saving.saved_step != job.progress.step:
            await _begin(job)
        if wait or job.control.no_space:
            await _wait_saved(job)

    await with_disk_space(job, drain, attempt)


async def _wait_saved(job: JobContext) -> None:
    """Waits until the checkpoint in progress, if there is one, is committed; an OSError of its write is raised here."""
    if job.saving.task is not None:
        task, job.saving.task = job.saving.task, None
        await task


async def wait_saved_if_possible(job: JobContext) -> None:
    """Waits for the checkpoint in progress; a full disk is no error: the checkpoint before it stays the newest."""
    try:
        await _wait_saved(job)
    except OSError as error:
        if not is_full(error):
            raise


async def _begin(job: JobContext) -> None:
    started, step = time.monotonic(), job.progress.step
    path = await asyncio.to_thread(job.checkpoints.begin, step)
    await job.ranks.save(path, export=job.spec.checkpoint.export)
    metrics.CHECKPOINT_HOLD_SECONDS.observe(time.monotonic() - started)
    job.saving.begun_step = step
    job.saving.task = asyncio.create_task(_write(job, step, _state(job), started), name=f"checkpoint of step {step}")


async def _write(job: JobContext, step: int, state: dict[str, Any], started: float) -> None:
    try:
        while (files := await job.ranks.saved()) is None:  # noqa: ASYNC110  the other ranks report only on request
            await asyncio.sleep(POLL_INTERVAL_S)
        await job.store.append_checkpoint(step, manifest_digest(step, state, files))
        final = await asyncio.to_thread(job.checkpoints.commit, step, state, files)
    except OSError:
        await asyncio.to_thread(job.checkpoints.discard, step)
        raise
    job.saving.saved_step = step
    if job.spec.checkpoint.export:
        await job.store.update(export=str(final / EXPORT))
    await job.store.event("checkpoint", {"step": step, "path": str(final)})
    metrics.CHECKPOINT_SECONDS.observe(time.monotonic() - started)


def _state(job: JobContext) -> dict[str, Any]:
    """State of the head in a checkpoint. Groups that wait for a step are not in it: see `recover`."""
    return {
        "lineage": job.progress.lineage,
        "ledger": job.buffer.ledger.state(),
        "start_step": job.progress.start_step,
        "data_offset": job.tasks.offset,
        "skipped_in_a_row": job.progress.skipped_in_a_row,
        "identity": job.identity.state(),
        NAMES_PLACES: True,
    }


async def with_disk_space(job: JobContext, drain: Drain, write: Callable[[], Awaitable[T]]) -> T:
    """Runs `write`, and repeats it while the disk is full; the job is paused meanwhile, and nothing is lost.

    consumes:     disk space
    waits for:    space, SPACE_RETRY_S at a time
    unblocked by: an operator who frees space
    produces:     the states `paused`, with the reason, and `running`

    Raises:
        Stopped: the job was cancelled, or the learner drains, while there was no space.
        OSError: `write` failed for another reason.
    """
    while True:
        try:
            result = await write()
        except OSError as error:
            if not is_full(error):
                raise
            await _pause(job, error)
        else:
            await _resume(job)
            return result
        if await drain.wait(SPACE_RETRY_S) or job.control.stopping:
            raise Stopped


async def _pause(job: JobContext, error: OSError) -> None:
    cause = f"no space left on {job.folder}: {error}"
    if job.control.no_space != cause:
        log.warning("paused: %s", cause)
        job.control.no_space = cause
        job.control.pause()
        await job.store.transition(JobState.PAUSED, allowed=LIVE, cause=cause)


async def _resume(job: JobContext) -> None:
    if not job.control.no_space:
        return
    log.info("there is space again")
    job.control.no_space = ""
    if not (await job.store.record()).pause_requested:
        job.resume()
        await job.store.transition(JobState.RUNNING, allowed=LIVE)
