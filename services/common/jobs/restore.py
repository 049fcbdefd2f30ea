"""Restorer: puts jobs back into a Redis that was emptied, moved or restored from a backup, from the jobs' own folders."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path

from redis.asyncio import Redis

from services.common.jobs import lua
from services.common.jobs.record import LIVE, JobRecord, JobState, to_hash
from services.common.jobs.records import JobHistory
from services.common.jobs.store import KEY_KEPT_S, JobStore
from services.common.redis import keys
from services.common.redis.connection import text

log = logging.getLogger(__name__)


async def restore(redis: Redis, jobs_dir: Path, record: JobRecord, incarnation: int | None = None) -> bool:
    """Puts a record (of `JobRecords.load`) and its history back into a Redis that has lost them; False if it has not.

    `incarnation`: of the head that restores the job it runs; None for other processes, which change no existing record.
    """
    now = time.time()
    event = json.dumps({"message": "Redis had lost this job: its record is back", "state": record.state})
    waits = record.state in {JobState.QUEUED, JobState.PAUSED} and record.learner is None
    queue = (
        keys.FETCHES if record.spec.references else keys.QUEUE
    )  # from there the gateway moves it on, at once if all is there
    names = [keys.record(record.id), keys.JOBS, queue, keys.ORDER, keys.events(record.id)]
    key, _, digest = record.idempotency.partition(" ")
    pairs = [item for pair in to_hash(record).items() for item in pair]
    done = await redis.register_script(lua.RESTORE)(
        keys=names + ([key] if key else []),
        args=[record.id, "" if incarnation is None else incarnation, record.order, int(waits), now, event,
              int(record.created_at + KEY_KEPT_S - now), digest, *pairs],
    )  # fmt: skip
    if record.learner and record.state in LIVE:
        await redis.zadd(keys.HELD, {record.id: record.started_at or now})
    if done:
        log.warning("Redis had lost job %s (%s): its record is back", record.id, record.state)
        await JobHistory(redis, jobs_dir).refill(record.id)
    return bool(done)


class Restorer:
    """Restores the jobs that one process is responsible for. The head of a running job restores it itself (`HeadStore`)."""

    def __init__(self, redis: Redis, jobs_dir: Path, who: str, mine: Callable[[JobRecord], bool]) -> None:
        """`who` names this process in Redis; `mine` selects the jobs that it puts back."""
        self._redis, self._jobs_dir = redis, jobs_dir
        self._store = JobStore(redis, jobs_dir)
        self._marker = keys.restored(who)
        self._mine = mine
        self._last_order = 0
        self._checked = False
        self._checking = asyncio.Lock()

    async def restore_lost(self) -> list[str]:
        """Puts back the jobs that Redis has lost; returns their ids. Cheap while nothing was lost: then no folder is read.

        Something was lost when this process's mark is gone, or the count of submitted jobs is lower than before.
        """
        if await self._is_complete():
            return []
        async with self._checking:  # of many callers at once, the first reads the folders
            return [] if await self._is_complete() else await self._put_back()

    async def _is_complete(self) -> bool:
        order = await self._submitted()
        if not (self._checked and order >= self._last_order and await self._redis.exists(self._marker)):
            return False
        self._last_order = order
        return True

    async def _put_back(self) -> list[str]:
        known = {text(raw) for raw in await self._redis.zrange(keys.JOBS, 0, -1)}
        found = [record for record in await asyncio.to_thread(self._folders, known) if self._mine(record)]
        found.sort(key=lambda record: (record.order, record.created_at))
        restored = [record.id for record in found if await restore(self._redis, self._jobs_dir, record)]
        await self._store.rebuild_held()
        await self._redis.set(self._marker, "1")
        self._checked, self._last_order = True, await self._submitted()
        return restored

    async def _submitted(self) -> int:
        return int(await self._redis.get(keys.ORDER) or 0)

    def _folders(self, known: set[str]) -> list[JobRecord]:
        """The records of the folders whose jobs Redis does not list."""
        lost = {path.parent.name for path in self._jobs_dir.glob("*/job.json")} - known
        return [record for job_id in lost if (record := self._store.records.load(job_id)) is not None]
