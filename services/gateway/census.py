"""How many jobs are in each state, without reading every job's record at every scrape."""

from __future__ import annotations

from collections import Counter
from typing import Any

from redis.asyncio import Redis

from services.common import keys
from services.common.connection import text
from services.common.job_records import JobState


class JobCensus:
    """Counts jobs. One that has ended never changes: it is counted once, and only the others are looked at again."""

    def __init__(self) -> None:
        """Knows no job."""
        self._ended: Counter[JobState] = Counter()
        self._open: list[str] = []
        self._newest = 0.0

    async def take(self, redis: Redis) -> dict[JobState, int]:
        """Jobs by state, every state named."""
        if await redis.zcard(keys.JOBS) < len(self._open) + self._ended.total():  # Redis lost its data
            self._ended, self._open, self._newest = Counter(), [], 0.0
        added: Any = await redis.zrange(keys.JOBS, f"({self._newest}", "+inf", byscore=True, withscores=True)
        for raw, order in added:
            self._open.append(text(raw))
            self._newest = float(order)
        counts = await self._look(redis)
        return {state: counts[state] + self._ended[state] for state in JobState}

    async def _look(self, redis: Redis) -> Counter[JobState]:
        """The open jobs by state; those that have ended since the last look are counted for good."""
        async with redis.pipeline(transaction=False) as pipe:
            for job_id in self._open:
                pipe.hget(keys.record(job_id), "state")
            replies = await pipe.execute()
        # A job without a state is one that Redis has just lost: it is put back, and counted then.
        found = [
            (job_id, JobState(text(raw))) for job_id, raw in zip(self._open, replies, strict=True) if raw is not None
        ]
        ended = {job_id for job_id, state in found if state.ended}
        self._open = [job_id for job_id in self._open if job_id not in ended]
        self._ended.update(state for _, state in found if state.ended)
        return Counter(state for _, state in found if not state.ended)
