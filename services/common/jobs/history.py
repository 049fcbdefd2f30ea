"""History of a job in Redis: step records, evaluation records and events. The job's own folder has the records, too."""

from __future__ import annotations

import asyncio
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from services.common.jobs import lua
from services.common.jobs.folder import JobFolder
from services.common.jobs.lua import new_token
from services.common.redis import keys
from services.common.redis.fencing import Fence, run

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
