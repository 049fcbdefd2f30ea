"""What concerns the whole system and no single service: read from Redis when the gateway is scraped. Labels are stages, states, workers."""

from __future__ import annotations

import math
from contextlib import suppress

from prometheus_client import CollectorRegistry, Gauge
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from services.common import keys
from services.common.job_records import ActiveJob
from services.common.jobs import JobStore
from services.common.keys import Stage
from services.common.workers import WorkerKind, WorkerStatus, alive
from services.gateway.census import JobCensus

NO_VERSION = -1
"""Stands for the version of a rollout server that holds no weights yet."""


class SystemMetrics:
    """Gauges that `refresh` brings up to date. Of several gateways each tells the same: dashboards take the maximum."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Everything at zero."""

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"millrace_gateway_{name}", text, labels, registry=registry)

        self._census = JobCensus()
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
        """Looks everything up; without Redis the gauges keep their last values."""
        try:
            await self._refresh(redis)
        except RedisError:
            self.redis_up.set(0)
            return
        self.redis_up.set(1)

    async def _refresh(self, redis: Redis) -> None:
        for state, count in (await self._census.take(redis)).items():
            self.jobs.labels(state).set(count)
        self.queued.set(await redis.zcard(keys.QUEUE))
        active = await JobStore(redis).active()
        self.active.set(len(active))
        await self._look_at_streams(redis, list(active))
        self._look_at_workers(await alive(redis), active)
        with suppress(ResponseError):  # a Redis user may lack the right to ask
            self.redis_memory.set((await redis.info("memory"))["used_memory"])

    async def _look_at_streams(self, redis: Redis, jobs: list[str]) -> None:
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

    def _look_at_workers(self, workers: list[WorkerStatus], active: dict[str, ActiveJob]) -> None:
        kinds = [worker.kind for worker in workers]
        for kind in WorkerKind:
            self.workers.labels(kind).set(kinds.count(kind))
        self.states.clear()
        self.lag.clear()
        for worker in workers:
            self.states.labels(worker.name, worker.kind, worker.state).set(1)
            job = active.get(worker.job_id or "")
            if worker.kind is WorkerKind.ROLLOUT and job is not None:
                version = NO_VERSION if worker.policy_version is None else worker.policy_version
                self.lag.labels(worker.name).set(max(0, job.policy_version - version))
