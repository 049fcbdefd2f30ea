"""Census of jobs: how many are in each state, without reading every job's record at every scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from redis.asyncio import Redis

from services.common import job_scripts, keys
from services.common.connection import text
from services.common.job_records import JobState

LOOKED_AT_ONCE = 500
"""Records of one script: at the first look there may be very many, and requests are answered in between."""


class JobCensus:
    """Counts jobs. One that has ended never changes: it is looked at once, and only the others again."""

    def __init__(self) -> None:
        """Knows no job."""
        self._ended: dict[str, JobState] = {}
        self._open: dict[str, None] = {}
        self._newest = 0.0

    async def take(self, redis: Redis) -> dict[JobState, int]:
        """Jobs by state, every state named."""
        if await redis.zcard(keys.JOBS) < len(self._open) + len(
            self._ended
        ):  # some were deleted, or Redis lost its data
            self._newest = 0.0
        since: Any = f"({self._newest}" if self._newest else "-inf"
        found: Any = await redis.zrange(keys.JOBS, since, "+inf", byscore=True, withscores=True)
        if not self._newest:
            self._keep({text(raw) for raw, _ in found})
        for raw, order in found:
            if text(raw) not in self._ended:
                self._open[text(raw)] = None
            self._newest = float(order)
        counts = await self._look(redis)
        ended = Counter(self._ended.values())
        return {state: counts[state] + ended[state] for state in JobState}

    def _keep(self, listed: Iterable[str]) -> None:
        """Forgets the jobs that are not listed any more."""
        self._ended = {job_id: self._ended[job_id] for job_id in listed if job_id in self._ended}
        self._open = {}

    async def _look(self, redis: Redis) -> Counter[JobState]:
        """The open jobs by state; those that have ended since the last look are counted for good."""
        counts: Counter[JobState] = Counter()
        ids, read = list(self._open), redis.register_script(job_scripts.ROWS)
        for first in range(0, len(ids), LOOKED_AT_ONCE):
            chunk = ids[first : first + LOOKED_AT_ONCE]
            found = await read(keys=[keys.record(job_id) for job_id in chunk], args=["state"])
            for job_id, (raw,) in zip(chunk, found, strict=True):
                if raw is None:
                    continue  # a job without a state is one that Redis has just lost: it is put back, and counted then
                state = JobState(text(raw))
                if state.ended:
                    self._ended[job_id] = state
                    self._open.pop(job_id, None)
                else:
                    counts[state] += 1
        return counts
