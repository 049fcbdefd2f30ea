"""Restorer: puts jobs back into a Redis that was emptied, moved, or put back to an older state: from the jobs' own folders."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path

from redis.asyncio import Redis

from services.common.jobs import lua
from services.common.jobs.history import JobHistory
from services.common.jobs.record import LIVE, JobRecord, JobState, to_hash
from services.common.jobs.store import KEY_KEPT_S, JobStore
from services.common.redis import keys
from services.common.redis.connection import text

log = logging.getLogger(__name__)


async def restore(redis: Redis, jobs_dir: Path, record: JobRecord, incarnation: int | None = None) -> bool:
    """Puts a record and its history back into a Redis that has lost them; False when it had not.

    Args:
        redis: client whose replies are bytes.
        jobs_dir: the jobs' own folders.
        record: what `JobRecords.saved` gave.
        incarnation: of the head that restores the job it runs; None for anybody else, who never changes a record that is there.
    """
    now = time.time()
    event = json.dumps({"message": "Redis had lost this job: its record is back", "state": record.state})
    waits = record.state in {JobState.QUEUED, JobState.PAUSED} and record.learner is None
    names = [keys.record(record.id), keys.JOBS, keys.QUEUE, keys.ORDER, keys.events(record.id)]
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
    """One process's look after the jobs that it answers for. A job that runs heals itself (`HeadStore`): this makes it known again."""

    def __init__(self, redis: Redis, jobs_dir: Path, who: str, mine: Callable[[JobRecord], bool]) -> None:
        """`who` names this process in Redis; `mine` tells which jobs it puts back."""
        self._redis = redis
        self._jobs_dir = jobs_dir
        self._store = JobStore(redis, jobs_dir)
        self._marker = keys.restored(who)
        self._mine = mine
        self._order = 0
        self._looked = False
        self._looking = asyncio.Lock()

    async def look(self) -> list[str]:
        """The ids of the jobs that were put back just now. Cheap while nothing was lost: then the folders are not read again.

        Something was lost when this process's mark is gone, or fewer jobs were ever submitted than it knows of.
        """
        if await self._whole():
            return []
        async with self._looking:  # of many at once, the first reads the folders
            return [] if await self._whole() else await self._put_back()

    async def _whole(self) -> bool:
        """Whether nothing was lost since the last look."""
        order = await self._submitted()
        if not (self._looked and order >= self._order and await self._redis.exists(self._marker)):
            return False
        self._order = order
        return True

    async def _put_back(self) -> list[str]:
        found = [record for record in await asyncio.to_thread(self._folders, await self._known()) if self._mine(record)]
        restored = [
            record.id for record in sorted(found, key=_by_age) if await restore(self._redis, self._jobs_dir, record)
        ]
        await self._store.find_held()
        await self._redis.set(self._marker, "1")
        self._looked, self._order = True, await self._submitted()
        return restored

    async def _submitted(self) -> int:
        return int(await self._redis.get(keys.ORDER) or 0)

    async def _known(self) -> set[str]:
        return {text(raw) for raw in await self._redis.zrange(keys.JOBS, 0, -1)}

    def _folders(self, known: set[str]) -> list[JobRecord]:
        """The records of the folders whose jobs Redis does not list."""
        names = [path.parent.name for path in self._jobs_dir.glob("*/job.json")]
        return [
            record for name in names if name not in known and (record := self._store.records.saved(name)) is not None
        ]


def _by_age(record: JobRecord) -> tuple[int, float]:
    return record.order, record.created_at
