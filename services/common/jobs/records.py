"""Records and histories of jobs in Redis. The jobs' own folders have both, too: they are rebuilt from there when Redis has lost them."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from functools import partial
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from services.common.errors import ConfigError
from services.common.jobs import lua
from services.common.jobs.folder import JobFolder, is_deleted
from services.common.jobs.lua import new_token
from services.common.jobs.record import JobRecord, from_document, from_hash, to_document
from services.common.redis import keys
from services.common.redis.connection import text
from services.common.redis.fencing import Fence, run
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


REFILL_CHUNK = 200
"""Records that one script call puts back."""


class JobHistory:
    """The histories of all jobs."""

    def __init__(self, redis: Redis, jobs_dir: Path | None = None, fence: Fence | None = None) -> None:
        """`jobs_dir` holds the jobs' own folders; `fence` is that of the head that writes."""
        self._redis, self._jobs_dir = redis, jobs_dir
        self._run = partial(run, redis, fence=fence)

    async def event(self, job_id: str, kind: str, data: dict[str, Any]) -> None:
        """Adds an event to `GET /jobs/{id}/events`."""
        names = [keys.events(job_id), keys.once(job_id, new_token())]
        await self._run(lua.ADD_EVENT, names, [kind, time.time(), json.dumps(data)])

    async def append_step(self, job_id: str, number: int, data: dict[str, Any], *, complete: bool = False) -> bool:
        """Adds a step's record to the history, once, and to the events; `number` counts the job's own steps from 1.

        False, and nothing is changed, when `complete` requires every step before and Redis lacks one.
        """
        args = [number, json.dumps(data), time.time(), int(complete)]
        return int(await self._run(lua.APPEND_STEP, [keys.steps(job_id), keys.events(job_id)], args)) != -1

    async def evaluated_steps(self, job_id: str) -> set[int]:
        """Steps whose evaluation is in the history."""
        return {int(json.loads(raw)["step"]) for raw in await self._redis.lrange(keys.evals(job_id), 0, -1)}

    async def append_eval(self, job_id: str, data: dict[str, Any]) -> None:
        """Adds an evaluation to the history and to the events."""
        names = [keys.evals(job_id), keys.events(job_id), keys.once(job_id, new_token())]
        await self._run(lua.APPEND_EVAL, names, [json.dumps(data), time.time()])

    async def refill(self, job_id: str) -> None:
        """Adds to the history in Redis what the job's folder has beyond it."""
        if self._jobs_dir is None:
            return
        history = await asyncio.to_thread(JobFolder(self._jobs_dir / job_id).history)
        for name, records in ((keys.steps(job_id), history.steps), (keys.evals(job_id), history.evals)):
            have = int(await self._redis.llen(name))
            while have < len(records):
                chunk = [json.dumps(record) for record in records[have : have + REFILL_CHUNK]]
                have = int(await self._run(lua.REFILL, [name], [have, *chunk]))
