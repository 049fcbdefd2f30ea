"""Metrics of the whole system, read from Redis at each scrape of the gateway. Labels are stages, states and workers."""

from __future__ import annotations

import math
from collections import Counter
from contextlib import suppress
from typing import Any

from prometheus_client import CollectorRegistry, Gauge
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from services.common.jobs import lua
from services.common.jobs.record import ActiveJob, JobState
from services.common.jobs.store import JobStore
from services.common.redis import keys
from services.common.redis.connection import text
from services.common.redis.keys import Stage
from services.common.service.heartbeat import WorkerKind, WorkerStatus, live_workers


class SystemMetrics:
    """Gauges that `refresh` updates. Several gateways report the same values: dashboards take the maximum."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"millrace_gateway_{name}", text, labels, registry=registry)

        self._job_counts = JobCounts()
        self.redis_up = gauge("redis_up", "1 when Redis answers, else 0.")
        self.redis_memory = gauge(
            "redis_memory_bytes", "Memory that Redis uses for its data; NaN while it is not told."
        )
        self.redis_memory.set(math.nan)
        self.jobs = gauge("jobs", "Jobs, by state.", "state")
        self.queued = gauge("queued_jobs", "Jobs waiting for a learner.")
        self.active = gauge("active_jobs", "Jobs that servers may attach to.")
        self.depth = gauge("stream_entries", "Entries in the active jobs' work streams, by stage.", "stage")
        self.dead = gauge("dead_letters", "Dead letters of the active jobs, by the stage they came from.", "stage")
        self.workers = gauge("workers", "Workers with a fresh heartbeat.", "kind")
        self.states = gauge("worker_info", "1 for each worker, with its present state.", "worker", "kind", "state")
        self.lag = gauge(
            "worker_lag_versions",
            "Policy versions that a rollout server is behind its job's newest; one without weights counts as version −1.",
            "worker",
        )

    async def refresh(self, redis: Redis) -> None:
        """Reads everything from Redis; without Redis the gauges keep their last values."""
        try:
            await self._refresh(redis)
        except RedisError:
            self.redis_up.set(0)
            return
        self.redis_up.set(1)

    async def _refresh(self, redis: Redis) -> None:
        for state, count in (await self._job_counts.count(redis)).items():
            self.jobs.labels(state).set(count)
        self.queued.set(await redis.zcard(keys.QUEUE) + await redis.zcard(keys.FETCHES))
        active = await JobStore(redis).active()
        self.active.set(len(active))
        await self._refresh_streams(redis, list(active))
        self._refresh_workers(await live_workers(redis), active)
        with suppress(ResponseError):  # the ACL may forbid INFO
            self.redis_memory.set((await redis.info("memory"))["used_memory"])

    async def _refresh_streams(self, redis: Redis, jobs: list[str]) -> None:
        async with redis.pipeline(transaction=False) as pipe:
            for stage in Stage:
                for job_id in jobs:
                    pipe.xlen(keys.stream(job_id, stage))
                    pipe.xlen(keys.dead(job_id, stage))
            lengths = await pipe.execute() if jobs else []
        for number, stage in enumerate(Stage):
            of_stage = lengths[2 * len(jobs) * number : 2 * len(jobs) * (number + 1)]
            self.depth.labels(stage).set(sum(of_stage[::2]))
            self.dead.labels(stage).set(sum(of_stage[1::2]))

    def _refresh_workers(self, workers: list[WorkerStatus], active: dict[str, ActiveJob]) -> None:
        kinds = [worker.kind for worker in workers]
        for kind in WorkerKind:
            self.workers.labels(kind).set(kinds.count(kind))
        self.states.clear()
        self.lag.clear()
        for worker in workers:
            self.states.labels(worker.name, worker.kind, worker.state).set(1)
            job = active.get(worker.job_id or "")
            if worker.kind is WorkerKind.ROLLOUT and job is not None:
                version = -1 if worker.policy_version is None else worker.policy_version
                self.lag.labels(worker.name).set(max(0, job.policy_version - version))


RECORDS_PER_SCRIPT = 500
"""At the first count there may be very many records; Redis answers other requests between two scripts."""


class JobCounts:
    """Counts of jobs by state. An ended job never changes: its record is read once, and only the others' again."""

    def __init__(self) -> None:
        self._ended: dict[str, JobState] = {}
        self._open: dict[str, None] = {}
        self._newest = 0.0

    async def count(self, redis: Redis) -> dict[JobState, int]:
        """Jobs by state, every state named."""
        # Some were deleted, or Redis lost its data.
        if await redis.zcard(keys.JOBS) < len(self._open) + len(self._ended):
            self._newest = 0.0
        since: Any = f"({self._newest}" if self._newest else "-inf"
        found: Any = await redis.zrange(keys.JOBS, since, "+inf", byscore=True, withscores=True)
        if not self._newest:  # jobs that are not listed any more are forgotten
            listed = [text(raw) for raw, _ in found]
            self._ended = {job_id: self._ended[job_id] for job_id in listed if job_id in self._ended}
            self._open = {}
        for raw, order in found:
            if text(raw) not in self._ended:
                self._open[text(raw)] = None
            self._newest = float(order)
        counts = await self._count_open(redis)
        ended = Counter(self._ended.values())
        return {state: counts[state] + ended[state] for state in JobState}

    async def _count_open(self, redis: Redis) -> Counter[JobState]:
        """The open jobs by state; those that have ended since the last count move to the ended ones."""
        counts: Counter[JobState] = Counter()
        ids, read = list(self._open), redis.register_script(lua.ROWS)
        for first in range(0, len(ids), RECORDS_PER_SCRIPT):
            chunk = ids[first : first + RECORDS_PER_SCRIPT]
            found = await read(keys=[keys.record(job_id) for job_id in chunk], args=["state"])
            for job_id, (raw,) in zip(chunk, found, strict=True):
                if raw is None:
                    continue  # Redis has just lost the record: it is restored, and counted then
                state = JobState(text(raw))
                if state.ended:
                    self._ended[job_id] = state
                    self._open.pop(job_id, None)
                else:
                    counts[state] += 1
        return counts
