"""Store of one running job's records, written by its head: fenced, kept in the job's folder, restored when Redis has lost them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, Self

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from services.common.errors import Fenced, RecordGone
from services.common.jobs import lua
from services.common.jobs.folder import HISTORY_FILE, JobFolder
from services.common.jobs.history_mark import HistoryMark, HistoryReader
from services.common.jobs.record import ActiveJob, JobRecord, JobState
from services.common.jobs.records import JobRecords
from services.common.jobs.restore import restore
from services.common.jobs.step_record import StepRecord
from services.common.jobs.store import JobStore
from services.common.redis import keys
from services.common.redis.fencing import MAX_RESTORES, Fence, raise_if_fenced, run

SAVE_TRIES = 3

log = logging.getLogger(__name__)


class HeadStore:
    """One job's records, for its head. Every write carries the head's incarnation; a newer head makes all of them raise `Fenced`."""

    def __init__(self, redis: Redis, jobs_dir: Path, job_id: str, incarnation: int) -> None:
        self.job_id = job_id
        self.fence = _fence_of(job_id, incarnation, self.restore)
        self.on_restored: Callable[[], None] = lambda: None
        """Called when Redis had lost the job's records and they are restored: the work in its streams is still lost."""
        self._redis, self._jobs_dir = redis, jobs_dir
        self._jobs = JobStore(redis, jobs_dir, self.fence)
        self._folder = JobFolder(jobs_dir / job_id)
        self._history = HistoryReader(self._folder.path / HISTORY_FILE)
        self._active: ActiveJob | None = None
        self._restore_lock = asyncio.Lock()
        self._steps = 0
        """Steps in the folder's history and in `_unwritten`."""
        self._unwritten: list[tuple[str, int, dict[str, Any]]] = []
        self._write_lock = asyncio.Lock()

    @classmethod
    async def begin(cls, redis: Redis, jobs_dir: Path, job_id: str) -> Self:
        """Takes the job's next incarnation, durably: from then on no older head can write.

        Raises:
            RecordGone: neither Redis nor the job's folder knows the job.
        """
        records = JobRecords(redis, jobs_dir)
        saved = await asyncio.to_thread(records.load, job_id)
        floor = saved.incarnation if saved is not None else 0
        taken = 0
        for _ in range(2):
            taken = int(await redis.register_script(lua.BEGIN)(keys=[keys.record(job_id)], args=[floor]))
            if taken or saved is None:
                break
            await restore(redis, jobs_dir, saved)
        if not taken:
            raise RecordGone(f"neither Redis nor {jobs_dir / job_id} knows job {job_id}")
        store = cls(redis, jobs_dir, job_id, taken)
        await records.save(job_id)
        await store._read_history()
        await store._jobs.history.refill(job_id)
        return store

    async def restore(self) -> None:
        """Restores the job's records and lets servers see it again; does nothing when another call has done so.

        Raises:
            Fenced: a newer head has begun.
            RecordGone: the job's folder does not have the record either.
        """
        async with self._restore_lock:
            saved = await self._saved()
            if saved is None:
                raise RecordGone(f"neither Redis nor {self._folder.path} knows job {self.job_id}")
            self._refuse_if_older(saved.incarnation)
            for _ in range(MAX_RESTORES):
                if await self._restore_once(saved):
                    return
            raise RecordGone(f"Redis loses the record of job {self.job_id} as often as it is put back")

    async def _restore_once(self, saved: JobRecord) -> bool:
        """Restores the record where it is missing; returns whether it was still there when servers could see the job again."""
        own = self.fence.incarnation
        try:
            if not await restore(self._redis, self._jobs_dir, saved, own):
                return True
        except ResponseError as error:
            raise_if_fenced(error, self.fence)
            raise
        self.on_restored()
        try:
            if self._active is not None:  # not with `self.fence`: it would call `restore`, and wait for itself
                await JobStore(self._redis, fence=_fence_of(self.job_id, own, _no_restore)).activate(self._active)
        except RecordGone:
            return False
        return True

    def require_newest(self) -> None:
        """To be called before a file of the job is written, as no Redis script fences files. Reads the folder's incarnation.

        Raises:
            Fenced: a newer head has begun.
        """
        self._refuse_if_older(self._folder.incarnation())

    def _refuse_if_older(self, newest: int) -> None:
        if newest > (own := self.fence.incarnation):
            raise Fenced(f"job {self.job_id}: this process is incarnation {own}, and {newest} writes")

    async def record(self) -> JobRecord:
        """The job's record, restored if Redis had lost it.

        Raises:
            Fenced: a newer head has begun.
            RecordGone: it is lost.
        """
        record = await self._jobs.find(self.job_id)
        if record is None or record.incarnation != self.fence.incarnation:
            if record is not None:
                self._refuse_if_older(record.incarnation)
            await self.restore()
            record = await self._jobs.find(self.job_id)
        if record is None:
            raise RecordGone(f"Redis has lost the record of job {self.job_id} again")
        return record

    async def transition(
        self, to: JobState, *, allowed: Iterable[JobState], cause: str = "", **values: str | float
    ) -> None:
        """Moves the job to another state; on return the job's folder has that state too, unless it cannot be written.

        Redis may lose the move before the folder has it: then the old record is restored, and moved again.
        """
        states = list(allowed)
        for _ in range(SAVE_TRIES):
            await self._jobs.transition(self.job_id, to, allowed=states, cause=cause, **values)
            saved = await self._saved()
            if saved is not None and saved.state is to:
                return
            states = [*states, to]
        log.error("the folder of job %s does not say that it is %s", self.job_id, to)

    async def update(self, **values: str | float) -> None:
        """Sets plain fields of the record."""
        await self._jobs.update(self.job_id, **values)

    async def update_in_redis(self, **values: str | float) -> None:
        """Like `update`, for fields that change often: the job's folder gets them with the next update or transition."""
        await self._jobs.update_in_redis(self.job_id, **values)

    async def event(self, kind: str, data: dict[str, Any]) -> None:
        """Adds an event to those of `GET /jobs/{id}/events`."""
        await self._jobs.history.event(self.job_id, kind, data)

    async def activate(self, job: ActiveJob) -> None:
        """Shows the job, or its newer address and version, to rollout and reward servers."""
        self._active = job
        await self._jobs.activate(job)

    async def active(self) -> ActiveJob | None:
        """The job as servers see it, or None."""
        return (await self._jobs.active()).get(self.job_id)

    async def retire(self) -> None:
        """Makes the servers detach, and deletes the work still in the job's streams."""
        self._active = None
        await self._jobs.retire(self.job_id)

    async def append_step(self, number: int, record: StepRecord) -> None:
        """Adds a step's record once to the history, in Redis and in the folder, and to the events."""
        history, data = self._jobs.history, record.as_json()
        if not await history.append_step(self.job_id, number, data, complete=True):
            await history.refill(self.job_id)  # Redis is behind: it was restored to an older state
            await history.append_step(self.job_id, number, data)
        if record.step > self._steps:  # after Redis, which refuses a head that is fenced
            self._steps = record.step
            await self._append_line("step", record.step, data)

    async def append_eval(self, data: dict[str, Any]) -> None:
        """Adds an evaluation to the history, in Redis and in the folder, and to the events."""
        await self._jobs.history.append_eval(self.job_id, data)
        await self._append_line("eval", int(data["step"]), data)

    async def evaluated_steps(self) -> set[int]:
        """Steps whose evaluation is in the history."""
        return await self._jobs.history.evaluated_steps(self.job_id)

    async def append_checkpoint(self, step: int, manifest: str) -> None:
        """Writes to the folder's history, durably, that a checkpoint is about to exist, with the digest of its manifest.

        Raises:
            OSError: the line could not be written, perhaps for lack of space; `write_history` writes it later.
        """
        self._unwritten.append(("checkpoint", step, {"manifest": manifest}))
        await self.write_history()

    async def history_mark(self) -> HistoryMark:
        """Length of the folder's history, and its digest."""
        async with self._write_lock:
            return await asyncio.to_thread(self._history.mark)

    async def write_history(self) -> None:
        """Writes the lines of the history that could not be written when they were added.

        Raises:
            OSError: they still cannot be written; they are kept.
        """
        async with self._write_lock:
            while self._unwritten:
                await asyncio.to_thread(self._folder.append, *self._unwritten[0])
                self._unwritten.pop(0)

    async def rewind(self, step: int) -> None:
        """Drops the records of later steps: the job continues from `step` without them.

        Raises:
            OSError: the folder could not be written, perhaps for lack of space; the call may be repeated.
        """
        await self.write_history()
        history = await asyncio.to_thread(self._folder.history)
        if not any(record["step"] > step for record in [*history.steps, *history.evals]):
            return
        log.warning("the history goes back to step %d", step)
        names = [keys.steps(self.job_id), keys.evals(self.job_id)]
        await run(self._redis, lua.CLEAR, names, [], fence=self.fence)
        await asyncio.to_thread(self._folder.append, "rewind", step, {})
        await self._read_history()
        await self._jobs.history.refill(self.job_id)

    async def _saved(self) -> JobRecord | None:
        return await asyncio.to_thread(self._jobs.records.load, self.job_id)

    async def _read_history(self) -> None:
        history = await asyncio.to_thread(self._folder.history)
        self._steps = history.steps[-1]["step"] if history.steps else 0

    async def _append_line(self, kind: str, step: int, data: dict[str, Any]) -> None:
        """Adds a line to the folder's history. One that cannot be written waits for `write_history`, whose caller gets the error."""
        self._unwritten.append((kind, step, data))
        try:
            await self.write_history()
        except OSError as error:
            log.warning("%s cannot be written: %s", self._folder.path, error)


def _fence_of(job_id: str, incarnation: int, restore_record: Callable[[], Awaitable[None]]) -> Fence:
    return Fence(f"job {job_id}", keys.record(job_id), incarnation, restore_record)


async def _no_restore() -> None:
    pass
