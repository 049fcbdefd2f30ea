"""What the rollout service does for the job that it is attached to."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError
from redis.asyncio import Redis

from services.common.config.settings import Settings
from services.common.errors import ModelError
from services.common.jobs.record import ActiveJob
from services.common.redis import keys
from services.common.redis.fencing import Fence
from services.common.service.heartbeat import WorkerKind, WorkerStatus
from services.common.service.lifecycle import Drain
from services.common.service.logs import log_context
from services.common.spec.job import JobSpec
from services.common.spec.rollout import DType
from services.common.streams.consumer import Consumer
from services.common.streams.worker import WorkerLimits
from services.rollout.engine.engine import Engine
from services.rollout.sampling.loop import CONSUMER_GROUP, READ_COUNT, TaskLoop
from services.rollout.sampling.sampler import Sampler
from services.rollout.weights.loop import WeightLoop
from services.rollout.weights.staging import Stage, default_stage_directory

log = logging.getLogger(__name__)

_STAGED_VERSIONS = 3  # two are kept while one arrives


@dataclass(frozen=True, slots=True)
class Wiring:
    """What every attachment of this process shares."""

    commands: Redis
    blocking: Redis
    engine: Engine
    settings: Settings
    name: str
    """This rollout server's stable name."""
    drain: Drain
    fence: Fence | None = None
    """Its right to that name."""


class Attachment:
    """One job: its model in the engine, its weights, its tasks."""

    def __init__(self, wiring: Wiring, job: ActiveJob) -> None:
        """Starts nothing yet."""
        self.job = job
        self._wiring = wiring
        self._weights: WeightLoop | None = None
        self._tasks: TaskLoop | None = None

    @property
    def groups(self) -> int:
        """Groups being worked on."""
        return self._tasks.groups if self._tasks is not None else 0

    @property
    def state(self) -> str:
        """A word for people."""
        if self._weights is None:
            return "loading"
        if self._weights.updating:
            return "updating"
        if self._wiring.engine.version is None:
            return "catching up"
        return "sampling" if self.groups else "idle"

    def update(self, job: ActiveJob) -> None:
        """The job's record changed: perhaps its learner listens elsewhere now."""
        self.job = job
        if self._weights is not None:
            self._weights.move(job.weights_address)

    async def run(self) -> None:
        """Until the drain, or cancelled.

        Raises:
            ModelError: this server cannot load the job's model.
        """
        wiring, job = self._wiring, self.job
        with log_context(job_id=job.job_id):
            spec = _spec(job)
            model_dir = Path(job.model_path)
            stage = Stage(_stage_directory(wiring, model_dir, spec))
            try:
                await wiring.engine.start(model_dir, spec)
                await self._serve(stage, spec)
            finally:
                await wiring.engine.label.change(None)
                stage.close()

    async def _serve(self, stage: Stage, spec: JobSpec) -> None:
        wiring, job = self._wiring, self.job
        token = wiring.settings.internal_token
        self._weights = WeightLoop(
            wiring.engine, stage, job.weights_address, job_id=job.job_id, server=wiring.name,
            token=token.get_secret_value() if token is not None else None,
        )  # fmt: skip
        consumer = Consumer(
            wiring.commands, wiring.blocking, job.job_id, keys.Stage.TASKS,
            group=CONSUMER_GROUP, name=wiring.name, fence=wiring.fence,
        )  # fmt: skip
        limits = WorkerLimits(entries=spec.rollout.max_concurrent_groups, read_count=READ_COUNT)
        sampler = Sampler(wiring.engine, wiring.name)
        self._tasks = TaskLoop(consumer, sampler, wiring.engine.label, limits, wiring.drain)
        weights = asyncio.create_task(self._weights.run(), name="weights")
        tasks = asyncio.create_task(self._tasks.run(), name="tasks")
        try:
            done, _ = await asyncio.wait({weights, tasks}, return_when=asyncio.FIRST_COMPLETED)
            for loop in done:
                loop.result()
        finally:
            for loop in (tasks, weights):  # tasks first: aborted requests need an engine that is not paused
                loop.cancel()
                await asyncio.gather(loop, return_exceptions=True)


def choose(active: Mapping[str, ActiveJob], workers: Sequence[WorkerStatus], name: str) -> ActiveJob | None:
    """The job to attach to: the one with the fewest other rollout servers, the first by id among equals; None when there is none."""
    attached = [worker.job_id for worker in workers if worker.kind is WorkerKind.ROLLOUT and worker.name != name]
    return min(active.values(), key=lambda job: (attached.count(job.job_id), job.job_id), default=None)


def _spec(job: ActiveJob) -> JobSpec:
    try:
        return JobSpec.model_validate(job.spec)
    except ValidationError as error:
        raise ModelError(f"job {job.job_id}: its spec is not understood here: {error}") from error


def _stage_directory(wiring: Wiring, model_dir: Path, spec: JobSpec) -> Path:
    size: Callable[[Path], int] = lambda path: path.stat().st_size  # noqa: E731
    model_bytes = sum(size(path) for path in model_dir.glob("*.safetensors"))
    need = _STAGED_VERSIONS * model_bytes * (2 if spec.model.dtype is DType.FLOAT32 else 1)
    return default_stage_directory(wiring.name, wiring.settings.home.resolve(), need, wiring.settings.shared_memory)
