"""Records of jobs in Redis, and their copies in the jobs' own folders, from which they are rebuilt when Redis has lost them."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from pathlib import Path

from redis.asyncio import Redis

from services.common.errors import ConfigError
from services.common.jobs.deleted import is_deleted
from services.common.jobs.folder import JobFolder
from services.common.jobs.record import JobRecord, from_document, from_hash, to_document
from services.common.redis import keys
from services.common.redis.connection import text
from services.common.spec.job import dump_spec, parse_recorded_spec

log = logging.getLogger(__name__)


class JobRecords:
    """The records of all jobs, in both places; without `jobs_dir` only in Redis."""

    def __init__(self, redis: Redis, jobs_dir: Path | None = None) -> None:
        self._redis, self._jobs_dir = redis, jobs_dir

    async def find(self, job_id: str) -> JobRecord | None:
        """The job's record, or None."""
        raw = await self._redis.hgetall(keys.record(job_id))
        return from_hash(job_id, {text(k): text(v) for k, v in raw.items()}) if raw else None

    async def save(self, job_id: str) -> None:
        """Writes the record into the job's folder; again when it has changed meanwhile, so that of several writers the newest state stays.

        A folder that cannot be written is logged: the job continues, and the next change is written again.
        """
        if self._jobs_dir is None:
            return
        folder, written = JobFolder(self._jobs_dir / job_id), None
        while (record := await self.find(job_id)) is not None and record != written:
            try:
                await asyncio.to_thread(folder.save, to_document(record), partial(dump_spec, record.spec))
            except OSError as error:
                log.error("%s cannot be written: %s", folder.path, error.strerror or error)  # noqa: TRY400  no defect of this code
                return
            written = record

    def load(self, job_id: str) -> JobRecord | None:
        """The record in the job's folder; None when there is none, the job was deleted, or it cannot be read (the reason is logged)."""
        if self._jobs_dir is None or is_deleted(self._jobs_dir / job_id):
            return None
        found = JobFolder(self._jobs_dir / job_id).load()
        try:
            return None if found is None else from_document(found[0], parse_recorded_spec(found[1]))
        except (ConfigError, KeyError, TypeError, ValueError) as error:
            log.warning("the folder of job %s holds no record that is understood here: %s", job_id, error)
            return None
