"""Service that attaches to every active job and judges its groups.

Redis: active jobs ──poll──► attach ──► rollouts stream ──► verdicts (worker processes) ──► scored stream
                                └── detach when a job is retired                        └──► samples, for people
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from redis.asyncio import Redis

from services.common.config.settings import Settings, load_settings
from services.common.errors import MillraceError
from services.common.jobs.follower import JobFollower
from services.common.jobs.record import ActiveJob
from services.common.jobs.store import JobStore
from services.common.programs.sandbox import CODE_REWARD, log_isolation
from services.common.redis.fencing import Fence
from services.common.redis.keys import Stage
from services.common.service.health import HealthServer
from services.common.service.heartbeat import HEARTBEAT_S, WorkerKind, WorkerStatus, write_heartbeat
from services.common.service.lifecycle import Drain, every, run_service
from services.common.service.worker import worker_process
from services.common.spec.learner import EvalSpec
from services.common.spec.reward import RewardSpec
from services.common.spec.rollout import RolloutSpec
from services.common.streams.consumer import Consumer
from services.common.streams.limits import entry_limit
from services.common.streams.stream import MAX_STREAM_LENGTH, forget
from services.reward import metrics
from services.reward.dispatch import Dispatch
from services.reward.models import Models
from services.reward.pool.pool import Pool
from services.reward.scorers.base import Backend
from services.reward.session import CONSUMER_GROUP, JobSession
from services.reward.trials import Trials

log = logging.getLogger(__name__)


class RewardService:
    """Attaches to every active job and judges its groups."""

    def __init__(
        self,
        commands: Redis,
        blocking: Redis,
        pool: Pool,
        *,
        name: str,
        drain: Drain,
        settings: Settings | None = None,
        bound: int = MAX_STREAM_LENGTH,
        fence: Fence | None = None,
    ) -> None:
        """Sets up the service, whose loops are `follow_jobs`, `heartbeat` and `trials.run`.

        `blocking`: a client for blocking reads only. `pool`: opened by its owner; each job has a pool beside it. `settings`: what the
        operator allows (default: the environment's). `bound`: most entries of a scored stream. `fence`: this process's right to `name`,
        which is stable.

        Raises ConfigError when the key of a judge endpoint cannot be had.
        """
        self._commands, self._blocking, self._pool = commands, blocking, pool
        self._name, self._drain, self._bound, self._fence = name, drain, bound, fence
        self._settings = settings or load_settings()
        self._models = Models(self._settings)
        self._attached: dict[str, tuple[JobSession, asyncio.Task[None]]] = {}
        self._refused: set[str] = set()
        self._follower = JobFollower(JobStore(commands), drain)
        self.trials = Trials(commands, self._dispatch_of, drain)
        """The loop of sections `reward` that are tried before a job uses them."""
        self.metrics_port: int | None = None
        """Port of /metrics, for the list of workers."""

    def healthy(self) -> str | None:
        """The reason why the process should be restarted, or None."""
        return self._follower.healthy() or self._trouble()

    def ready(self) -> str | None:
        """The reason why it takes no work, or None."""
        return self._follower.ready() or self._trouble()

    def _trouble(self) -> str | None:
        backends: list[Backend] = [self._pool, *(session.dispatch for session, _ in self._attached.values())]
        return next((fault for each in backends if (fault := each.fault()) is not None), None)

    async def follow_jobs(self) -> None:
        """Judges the groups of every active job until the drain, and then those in flight."""
        try:
            await self._follower.run(self._attach_and_detach)
            await asyncio.gather(*(task for _, task in self._attached.values()))
        finally:
            for _, task in self._attached.values():
                task.cancel()
            await asyncio.gather(*(task for _, task in self._attached.values()), return_exceptions=True)
            await self._models.close()

    async def heartbeat(self) -> None:
        """Consumes nothing; waits for the next beat; produces this worker's entry in the list of workers, and gauges."""
        await every(HEARTBEAT_S, self._drain, self._beat)

    async def _attach_and_detach(self, active: Mapping[str, ActiveJob]) -> None:
        for job_id, (_, task) in list(self._attached.items()):
            if task.done() and not self._drain.requested:
                task.result()
                raise MillraceError(f"the loop of job {job_id} ended without being asked to")
            if job_id not in active:
                await self._detach(job_id)
        self._refused &= active.keys()
        for job_id in active.keys() - self._attached.keys() - self._refused:
            self._attach(active[job_id])

    def _attach(self, job: ActiveJob) -> None:
        try:
            spec = RewardSpec.model_validate(job.spec.get("reward", {}))
            limit_bytes = _entry_limit(job.spec)
        except ValidationError:
            log.exception("job %s is not judged here: a section of its spec is not understood", job.job_id)
            self._refused.add(job.job_id)
            return
        consumer = Consumer(
            self._commands, self._blocking, job.job_id, Stage.ROLLOUTS,
            group=CONSUMER_GROUP, name=self._name, limit_bytes=limit_bytes, fence=self._fence,
        )  # fmt: skip
        session = JobSession(self._commands, consumer, self._dispatch_of(spec), drain=self._drain, bound=self._bound)
        task = asyncio.create_task(session.run(), name=f"job {job.job_id}")
        self._attached[job.job_id] = session, task
        log.info("attached to job %s", job.job_id)

    def _dispatch_of(self, spec: RewardSpec) -> Dispatch:
        """A section's scorers, not yet open, with processes of their own: nobody waits for another's checks."""
        return Dispatch(spec, self._pool.sibling(), self._settings, self._models.of(spec))

    async def _detach(self, job_id: str) -> None:
        """Stops work for a retired job, and deletes its streams: a read or write in flight may have created them again."""
        _, task = self._attached.pop(job_id)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await forget(self._commands, job_id)
        log.info("detached from job %s", job_id)

    async def _beat(self) -> None:
        sessions = [session for session, _ in self._attached.values()]
        in_flight = sum(session.in_flight for session in sessions)
        queued = sum(session.dispatch.queued for session in sessions)
        metrics.GROUPS_IN_FLIGHT.set(in_flight)
        metrics.CHECKS_QUEUED.set(queued)
        state = "draining" if self._drain.requested else "judging" if in_flight else "idle"
        progress_at = max((session.dispatch.progress_at for session in sessions), default=0.0)
        detail: dict[str, str | int | float] = {
            "jobs": len(self._attached), "groups_in_flight": in_flight, "checks_queued": queued,
            "verifier_processes": self._pool.workers, **self._models.status(),
        }  # fmt: skip
        status = WorkerStatus(
            self._name, WorkerKind.REWARD, state, job_id=next(iter(self._attached), None), metrics_port=self.metrics_port,
            progress_age_s=time.monotonic() - progress_at if in_flight else None, detail=detail,
        )  # fmt: skip
        await write_heartbeat(self._commands, status, self._fence)


def _entry_limit(spec: Mapping[str, Any]) -> int:
    """The job's limit of an entry, bytes; a setting that only a later release knows does not change it."""
    rollout = RolloutSpec.model_validate(spec.get("rollout", {}), extra="ignore")
    return entry_limit(rollout, EvalSpec.model_validate(spec.get("eval", {}), extra="ignore"))


async def run(settings: Settings, *, drain: Drain | None = None, pool: Pool | None = None) -> None:
    """Runs the service until the drain. Raises ConfigError when Redis, or the port of the metrics, cannot be used.

    `drain`: by default requested by SIGTERM and SIGINT. `pool`: not yet open; by default one with `default_workers()`.
    """
    async with (
        worker_process(settings, "reward", drain) as worker,
        pool or Pool(log_level=settings.log_level, environment={CODE_REWARD: settings.code_reward}) as started,
    ):
        service = RewardService(
            worker.commands,
            worker.blocking,
            started,
            name=worker.name,
            drain=worker.drain,
            settings=settings,
            fence=worker.fence,
        )
        await log_isolation(settings.code_reward)
        host, port = settings.bind_host, settings.metrics_port
        with HealthServer(host, port, healthy=service.healthy, ready=service.ready) as health:
            service.metrics_port = health.port
            log.info(
                "reward service %s: %d verifier processes, health on port %d", worker.name, started.workers, health.port
            )
            loops = {"jobs": service.follow_jobs, "heartbeat": service.heartbeat, "trials": service.trials.run}
            await run_service(worker.drain, loops, drain_timeout_s=settings.drain_timeout_s)
