"""A full disk under the job's folder: the job is paused with the reason, tries again, and goes on by itself."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from services.common.job_records import LIVE, JobState
from services.common.lifecycle import Drain
from services.learner.context import JobContext, Stopped
from services.learner.disk import is_full

log = logging.getLogger(__name__)

RETRY_S = 2.0

T = TypeVar("T")


async def with_room(job: JobContext, drain: Drain, write: Callable[[], Awaitable[T]]) -> T:
    """Does what writes to the disk, again and again while there is no space; the job is paused meanwhile, and nothing is lost.

    consumes:     disk space
    waits for:    space, RETRY_S at a time
    unblocked by: whoever makes room
    produces:     the states `paused`, with the reason, and `running`

    Raises:
        Stopped: the job was cancelled, or the learner drains, while there was none.
        OSError: whatever else went wrong.
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
        if await drain.wait(RETRY_S) or job.stopping:
            raise Stopped


async def _pause(job: JobContext, error: OSError) -> None:
    cause = f"no space left on {job.folder}: {error}"
    if job.no_space != cause:
        log.warning("paused: %s", cause)
        job.no_space = cause
        job.pause()
        await job.store.transition(job.job_id, JobState.PAUSED, allowed=LIVE, cause=cause)


async def _resume(job: JobContext) -> None:
    if not job.no_space:
        return
    log.info("there is space again")
    job.no_space = ""
    if not (await job.store.get(job.job_id)).pause_requested:
        job.resume()
        await job.store.transition(job.job_id, JobState.RUNNING, allowed=LIVE)
