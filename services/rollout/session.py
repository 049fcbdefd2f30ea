"""Session of one job: its model in the engine, its weights, its tasks, from the attachment to its end."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError
from redis.asyncio import Redis

from services.common.config.settings import Settings
from services.common.environments.servers import EnvironmentServers
from services.common.errors import ModelError
from services.common.jobs.record import ActiveJob
from services.common.models.weight_files import version_bytes
from services.common.redis import keys
from services.common.redis.fencing import Fence
from services.common.service.heartbeat import WorkerKind, WorkerStatus
from services.common.service.lifecycle import Drain
from services.common.service.logs import log_context
from services.common.spec.base import RECORDED
from services.common.spec.job import JobSpec
from services.common.streams.consumer import Consumer
from services.common.streams.limits import entry_limit
from services.common.streams.worker import WorkerLimits
from services.common.weight_sync.staging import Stage, default_stage_directory
from services.rollout.engine.engine import Engine
from services.rollout.sampling.loop import CONSUMER_GROUP, READ_COUNT, TaskLoop
from services.rollout.sampling.sampler import Sampler
from services.rollout.weights.loop import WeightLoop
from services.rollout.weights.relaying import Relaying

log = logging.getLogger(__name__)

_STAGED_VERSIONS = 3  # two are kept while one arrives
_PREPARED = 0.25
"""Groups that are encoded, decoded and sent beside those that the engine samples, as a share of these: the engine waits for none of it."""


@dataclass(frozen=True, slots=True)
class Wiring:
    """Objects that all sessions of this process share."""

    commands: Redis
    blocking: Redis
    engine: Engine
    settings: Settings
    name: str
    """This rollout server's stable name."""
    drain: Drain
    fence: Fence | None = None
    """This process's right to that name."""


class JobSession:
    """One job: its model in the engine, its weights, its tasks."""

    def __init__(self, wiring: Wiring, job: ActiveJob) -> None:
        self.job = job
        self._wiring = wiring
        self._weights: WeightLoop | None = None
        self._tasks: TaskLoop | None = None
        self._sampler: Sampler | None = None

    @property
    def groups(self) -> int:
        """Groups in flight."""
        return self._tasks.groups if self._tasks is not None else 0

    @property
    def trouble(self) -> str:
        """Why groups do not begin; empty while they do."""
        return self._sampler.trouble if self._sampler is not None else ""

    @property
    def state(self) -> str:
        """State of this server in the list of workers."""
        if self._weights is None:
            return "loading"
        if self._weights.updating:
            return "updating"
        if self._wiring.engine.version is None:
            return "catching up"
        return "sampling" if self.groups else "idle"

    def update(self, job: ActiveJob) -> None:
        """Takes the job's new record: the learner may have another address now."""
        self.job = job
        if self._weights is not None:
            self._weights.move(job.weights_address)

    async def run(self) -> None:
        """Serves the job until the drain, or its cancellation. Raises ModelError when its model cannot be loaded."""
        wiring, job = self._wiring, self.job
        with log_context(job_id=job.job_id):
            try:
                spec = JobSpec.model_validate(job.spec, context=RECORDED)
            except ValidationError as error:
                raise ModelError(f"job {job.job_id}: its spec is not understood here: {error}") from error
            model_dir = Path(job.model_path)
            need = _STAGED_VERSIONS * version_bytes(model_dir, spec.model.dtype)
            home, shared_memory = wiring.settings.home.resolve(), wiring.settings.shared_memory
            stage = Stage(default_stage_directory(wiring.name, home, need, shared_memory))
            try:
                await wiring.engine.start(model_dir, spec)
                await self._serve(stage, spec)
            finally:
                await wiring.engine.label.change(None)
                stage.close()

    async def _serve(self, stage: Stage, spec: JobSpec) -> None:
        wiring, job = self._wiring, self.job
        settings, token = wiring.settings, wiring.settings.internal_secret
        relay = Relaying(job.job_id, settings.bind_host, settings.advertise_host, token)
        self._weights = WeightLoop(
            wiring.engine, stage, relay, job.weights_address, job_id=job.job_id, server=wiring.name, token=token
        )
        consumer = Consumer(
            wiring.commands, wiring.blocking, job.job_id, keys.Stage.TASKS,
            group=CONSUMER_GROUP, name=wiring.name, limit_bytes=entry_limit(spec.rollout, spec.eval), fence=wiring.fence,
        )  # fmt: skip
        groups = spec.rollout.max_concurrent_groups
        limits = WorkerLimits(entries=groups + math.ceil(groups * _PREPARED), read_count=READ_COUNT)
        worlds = EnvironmentServers(wiring.commands, token)
        self._sampler = Sampler(wiring.engine, wiring.name, groups, worlds)
        self._tasks = TaskLoop(consumer, self._sampler, wiring.engine.label, limits, wiring.drain)
        weights = asyncio.create_task(self._weights.run(), name="weights")
        tasks = asyncio.create_task(self._tasks.run(), name="tasks")
        try:
            done, _ = await asyncio.wait({weights, tasks}, return_when=asyncio.FIRST_COMPLETED)
            for loop in done:
                loop.result()
        finally:
            await wiring.engine.release()
            for loop in (tasks, weights):  # tasks first: an abort needs an engine that is not paused
                loop.cancel()
                await asyncio.gather(loop, return_exceptions=True)
            await asyncio.to_thread(relay.close)
            await worlds.close()


def choose(active: Mapping[str, ActiveJob], workers: Sequence[WorkerStatus], name: str) -> ActiveJob | None:
    """The job with the fewest other rollout servers, the first by id among equals; None when no job is active."""
    attached = [worker.job_id for worker in workers if worker.kind is WorkerKind.ROLLOUT and worker.name != name]
    return min(active.values(), key=lambda job: (attached.count(job.job_id), job.job_id), default=None)
