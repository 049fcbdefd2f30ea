"""Puts jobs back into a Redis that was emptied, moved, or put back to an older state: from the jobs' own folders."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from redis.asyncio import Redis

from services.common.jobs.record import JobRecord
from services.common.jobs.store import JobStore
from services.common.redis import keys
from services.common.redis.connection import text


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
        restored = [record.id for record in sorted(found, key=_by_age) if await self._store.restore(record)]
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
        return [record for name in names if name not in known and (record := self._store.saved(name)) is not None]


def _by_age(record: JobRecord) -> tuple[int, float]:
    return record.order, record.created_at
