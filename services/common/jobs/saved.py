"""A job's record in Redis, and the copy of it in the job's own folder: what it is rebuilt from when Redis has lost it."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from functools import partial

from services.common.errors import ConfigError, JobConflict
from services.common.jobs import lua
from services.common.jobs.deleted import is_deleted
from services.common.jobs.folder import JobFolder
from services.common.jobs.history import JobHistory
from services.common.jobs.record import LIVE, JobRecord, JobState, from_document, from_hash, to_document, to_hash
from services.common.redis import keys
from services.common.redis.connection import text
from services.common.spec.job import dump_spec, parse_recorded_spec

log = logging.getLogger(__name__)

KEY_KEPT_S = 24 * 3600
"""An Idempotency-Key is remembered this long."""


class SavedJobs(JobHistory):
    """The records of all jobs, in both places."""

    async def find(self, job_id: str) -> JobRecord | None:
        """The job's record, or None."""
        raw = await self._redis.hgetall(keys.record(job_id))
        return from_hash(job_id, {text(k): text(v) for k, v in raw.items()}) if raw else None

    async def get(self, job_id: str) -> JobRecord:
        """The job's record.

        Raises:
            JobConflict: there is no such job.
        """
        record = await self.find(job_id)
        if record is None:
            raise JobConflict(f"there is no job {job_id!r}")
        return record

    async def save(self, job_id: str) -> None:
        """Writes the record into the job's folder; once more when it moves meanwhile, so that of several writers the newest state stays.

        A folder that cannot be written is told in the log: the job goes on, and the next move is written again.
        """
        if self._jobs_dir is None:
            return
        folder, written = JobFolder(self._jobs_dir / job_id), None
        while (record := await self.find(job_id)) is not None and record != written:
            try:
                await asyncio.to_thread(folder.save, to_document(record), partial(dump_spec, record.spec))
            except OSError as error:
                log.error("%s cannot be written: %s", folder.path, error.strerror or error)  # noqa: TRY400  no fault of this code
                return
            written = record

    def saved(self, job_id: str) -> JobRecord | None:
        """The record in the job's folder; None when there is none, the job was deleted, or it cannot be read (the log says why)."""
        if self._jobs_dir is None or is_deleted(self._jobs_dir / job_id):
            return None
        found = JobFolder(self._jobs_dir / job_id).load()
        try:
            return None if found is None else from_document(found[0], parse_recorded_spec(found[1]))
        except (ConfigError, KeyError, TypeError, ValueError) as error:
            log.warning("the folder of job %s holds no record that is understood here: %s", job_id, error)
            return None

    async def restore(self, record: JobRecord, incarnation: int | None = None) -> bool:
        """Puts a record and its history back into a Redis that has lost them; False when it had not.

        Args:
            record: what `saved` gave.
            incarnation: of the head that restores the job it runs; None for anybody else, who never changes a record that is there.
        """
        now, event = (
            time.time(),
            json.dumps({"message": "Redis had lost this job: its record is back", "state": record.state}),
        )
        waits = record.state in {JobState.QUEUED, JobState.PAUSED} and record.learner is None
        names = [keys.record(record.id), keys.JOBS, keys.QUEUE, keys.ORDER, keys.events(record.id)]
        key, _, digest = record.idempotency.partition(" ")
        pairs = [item for pair in to_hash(record).items() for item in pair]
        done = await self._redis.register_script(lua.RESTORE)(
            keys=names + ([key] if key else []),
            args=[record.id, "" if incarnation is None else incarnation, record.order, int(waits), now, event,
                  int(record.created_at + KEY_KEPT_S - now), digest, *pairs],
        )  # fmt: skip
        if record.learner and record.state in LIVE:
            await self._redis.zadd(keys.HELD, {record.id: record.started_at or now})
        if done:
            log.warning("Redis had lost job %s (%s): its record is back", record.id, record.state)
            await self.refill(record.id)
        return bool(done)
