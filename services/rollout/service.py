"""The rollout service: long-running; attaches to a job, samples its tasks, and takes its new weights while it does.

active jobs (Redis) ── attach ──► engine (vLLM), one job at a time
                                     ▲      │
learner ── Watch ──► weights: fetch ─┘      │ pieces, stamped with the version that sampled them
           (gRPC)    verify · activate      ▼
tasks stream ──────► tasks ──► sampler ──► group ── hop ──► rollouts stream

gateway ── Generate (gRPC) ──► policies ──► lane ──► engine: chats, behind the rollouts

heartbeat: this worker's entry in the list, gauges        watchdog: the engine hangs: it is killed, and the process ends

What ends the work for a job (its model does not load, the engine dies) is counted against it (`services.common.jobs.deaths`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from contextlib import aclosing

from redis.exceptions import RedisError

from services.common.config.settings import Settings, address
from services.common.errors import ConfigError, Fenced, MillraceError, ModelError, RecordGone
from services.common.jobs import deaths
from services.common.jobs.follower import JobFollower
from services.common.jobs.record import ActiveJob
from services.common.jobs.store import JobStore
from services.common.service.health import HealthServer
from services.common.service.heartbeat import HEARTBEAT_S, WorkerKind, WorkerStatus, alive, beat
from services.common.service.lifecycle import Drain, every, run_service
from services.common.service.logs import log_context
from services.common.service.preflight import require_memory, require_platform
from services.common.service.worker import worker_process
from services.common.streams.stream import forget
from services.rollout import metrics
from services.rollout.chat.exports import ExportLoader
from services.rollout.chat.policies import Policies
from services.rollout.chat.queue import ChatLane
from services.rollout.chat.server import InferenceService, serving
from services.rollout.engine.engine import Engine
from services.rollout.engine.health import EngineWatch
from services.rollout.engine.process import CHAT_PLACES
from services.rollout.engine.update import EngineError
from services.rollout.session import Attachment, Wiring, choose

log = logging.getLogger(__name__)

REFUSED_S = 30.0
"""A job whose model does not load here is tried again after this."""
TROUBLE_CHARS = 500
REPORT_S = 5.0
_NOT_THE_JOBS = (RedisError, Fenced, RecordGone, OSError)
"""What ends this process without saying anything about the job that it serves."""


class RolloutService:
    """The loops of the process."""

    def __init__(self, wiring: Wiring) -> None:
        """Runs nothing yet."""
        self._wiring = wiring
        self._attached: Attachment | None = None
        self._serving: asyncio.Task[None] | None = None
        self._refused: dict[str, float] = {}
        self._sampled = False
        """Whether the attached job has got as far as sampling."""
        self._blamed = False
        """Whether what ends this process is counted against the attached job."""
        self._trouble = ""
        """Why the newest job could not be served."""
        self._state = ("", 0.0)
        """The state that the newest heartbeat told, and since when."""
        self._follower = JobFollower(JobStore(wiring.commands), wiring.drain)
        self.metrics_port: int | None = None
        """Where /metrics is served, for the list of workers."""
        self.inference_address: str | None = None
        """Where chats are answered, for the gateway."""
        lane = ChatLane(CHAT_PLACES)
        loader = ExportLoader(wiring.engine, wiring.settings, wiring.commands, wiring.name)
        self._policies = Policies(wiring.engine, lane, JobStore(wiring.commands), loader.load)
        self.inference = InferenceService(wiring.engine, self._policies, lane)
        self._watch = EngineWatch(wiring.engine)
        self._hangs: str | None = None

    def healthy(self) -> str | None:
        """Why the process should be restarted, or None."""
        return self._follower.healthy() or self._hangs

    def ready(self) -> str | None:
        """Why it takes no work, or None. A model that loads, however long, keeps nobody waiting: the heartbeat says that it does."""
        return self._follower.ready()

    async def attach(self) -> None:
        """Serves one active job at a time until the drain, and then its groups in hand."""
        try:
            await self._follower.run(self._look)
            if self._serving is not None and self._attached is not None and self._attached.state != "loading":
                await self._serving
        finally:
            await self._policies.drain()
            await self._detach()

    async def heartbeat(self) -> None:
        """Tells that the worker lives.

        Consumes: nothing. Waits for: the next beat. Unblocked by: time. Produces: the entry in the list of workers, and gauges.
        """
        await every(HEARTBEAT_S, self._wiring.drain, self._beat)

    async def watchdog(self) -> None:
        """Kills an engine that makes no progress, and ends the process.

        Consumes: the engine's newest token's time. Waits for: the next look. Unblocked by: time. Produces: EngineError.
        """
        try:
            await every(1.0, self._wiring.drain, self._look_at_engine)
        finally:
            self._watch.close()

    async def _look(self, active: dict[str, ActiveJob]) -> None:
        if self._attached is not None and self._serving is not None:
            job = active.get(self._attached.job.job_id)
            if self._serving.done():
                await self._ended(self._attached.job.job_id, self._serving)
            elif job is None:
                log.info("job %s is retired", self._attached.job.job_id)
                await self._detach()
            else:
                self._attached.update(job)
                await self._mark_sampling(self._attached)
        if self._attached is None:
            now = time.monotonic()
            self._refused = {job_id: until for job_id, until in self._refused.items() if until > now}
            open_jobs = {job_id: job for job_id, job in active.items() if job_id not in self._refused}
            job = choose(open_jobs, await alive(self._wiring.commands), self._wiring.name) if open_jobs else None
            if job is not None:
                await self._attach(job)

    async def _attach(self, job: ActiveJob) -> None:
        await self._policies.claim(job.job_id)
        log.info("attaching to job %s", job.job_id)
        self._sampled = False
        await deaths.serving(self._wiring.commands, job.job_id, self._wiring.name, loading=True)
        self._attached = Attachment(self._wiring, job)
        self._serving = asyncio.create_task(self._attached.run(), name=f"job {job.job_id}")

    async def _mark_sampling(self, attached: Attachment) -> None:
        """From its first token on, an end of this process is no failed start."""
        if self._wiring.engine.sampled and not self._sampled:
            self._sampled = True
            await deaths.serving(self._wiring.commands, attached.job.job_id, self._wiring.name, loading=False)

    async def _ended(self, job_id: str, serving: asyncio.Task[None]) -> None:
        """The attachment ended by itself: its error is this process's, unless only the job or a setting is to blame."""
        try:
            serving.result()
        except ConfigError as error:
            with log_context(job_id=job_id):
                log.exception("job %s cannot be served here", job_id)
                self._refused[job_id] = time.monotonic() + REFUSED_S
                self._trouble = f"{self._wiring.name} cannot serve job {job_id}: {error}"[:TROUBLE_CHARS]
                if isinstance(error, ModelError):
                    await self._blame(error)
            await self._detach()
            self._blamed = False  # this process goes on
        except _NOT_THE_JOBS:
            raise
        except Exception as error:
            await self._blame(error)
            raise
        else:
            if not self._wiring.drain.requested:
                raise MillraceError(f"the loops of job {job_id} ended without being asked to")

    async def _blame(self, error: Exception) -> None:
        """Counts the end of this server's work against the attached job, once; the cause ends with the engine's own last words."""
        attached, engine = self._attached, self._wiring.engine
        if attached is None or self._blamed:
            return
        self._blamed = True
        cause = str(error) if isinstance(error, MillraceError) else f"{type(error).__name__}: {error}"
        said = await engine.last_error()
        death = deaths.Death(
            self._wiring.name, cause if said in cause else f"{cause}: {said}", time.time(), loading=not self._sampled
        )
        with log_context(job_id=attached.job.job_id):
            log.error("%s: counted against job %s", death.cause, attached.job.job_id)
        # Without Redis the mark stays, and the next process of this name counts it.
        with contextlib.suppress(TimeoutError, RedisError):
            async with asyncio.timeout(REPORT_S):
                await deaths.report(self._wiring.commands, attached.job.job_id, death)

    async def _detach(self) -> None:
        """Lets the job go; aborts its requests."""
        attached, serving = self._attached, self._serving
        if attached is None or serving is None:
            return
        # First, while the engine is not paused: aborted requests need one that runs.
        await self._policies.clear("the job left this server: ask again")
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        self._attached = self._serving = None
        if not self._blamed:
            await deaths.served(self._wiring.commands, attached.job.job_id, self._wiring.name)
        self._policies.release()
        await forget(self._wiring.commands, attached.job.job_id)
        log.info("detached from job %s", attached.job.job_id)

    def _progress_age_s(self, state: str) -> float:
        """For the heartbeat. A model that loads and weights that change have limits of their own: they count as progress."""
        now, engine = time.monotonic(), self._wiring.engine
        if state != self._state[0] or state in {"loading", "updating"}:
            self._state = (state, now)
        return now - max(self._state[1], engine.progress_at if engine.requests else 0.0)

    async def _look_at_engine(self) -> None:
        try:
            self._judge_engine()
        except EngineError as error:
            await self._blame(error)
            raise

    def _judge_engine(self) -> None:
        self._wiring.engine.check()
        if self._policies.fault is not None:
            raise self._policies.fault
        self._hangs = self._watch.trouble()
        if self._hangs is not None:
            self._wiring.engine.kill()  # what waits for it ends now, and others claim the work
            raise EngineError(self._hangs)

    async def _beat(self) -> None:
        attached, engine = self._attached, self._wiring.engine
        state = attached.state if attached is not None else self._policies.hosting or "idle"
        state = "draining" if self._wiring.drain.requested else state
        version = engine.version
        metrics.POLICY_VERSION.set(version.n if version is not None else -1)
        metrics.LINEAGE.set(version.lineage if version is not None else -1)
        groups = attached.groups if attached is not None else 0
        metrics.GROUPS_IN_FLIGHT.set(groups)
        metrics.BUSY.note(engine.requests)
        detail: dict[str, str | int | float] = {"groups_in_flight": groups, "requests_in_flight": engine.requests}
        detail["chats_in_flight"] = engine.chats
        if self._trouble and version is None:
            detail["trouble"] = self._trouble
        status = WorkerStatus(
            self._wiring.name,
            WorkerKind.ROLLOUT,
            state,
            job_id=attached.job.job_id if attached is not None else self._policies.hosted,
            policy_version=version.n if version is not None else None,
            metrics_port=self.metrics_port,
            inference_address=self.inference_address,
            progress_age_s=self._progress_age_s(state),
            detail=detail,
        )
        await beat(self._wiring.commands, status, self._wiring.fence)


async def run(settings: Settings, *, drain: Drain | None = None) -> None:
    """Runs the service until it is told to drain.

    Args:
        settings: of the process.
        drain: requested by others (tests); by default by SIGTERM and SIGINT.

    Raises:
        ConfigError: what is installed is for another platform, or Redis or a port cannot be used as the settings say.
    """
    settings.require_token_beyond_loopback(settings.internal_token, "MILLRACE_INTERNAL_TOKEN")
    require_platform(settings.platform)
    require_memory(settings.min_memory_gib)
    token = settings.internal_token.get_secret_value() if settings.internal_token is not None else None
    async with (
        worker_process(settings, "rollout", drain) as worker,
        aclosing(Engine(settings.platform, settings.log_level)) as engine,
    ):
        await deaths.adopt(worker.commands, worker.name)
        service = RolloutService(
            Wiring(worker.commands, worker.blocking, engine, settings, worker.name, worker.drain, worker.fence)
        )
        with HealthServer(
            settings.bind_host, settings.metrics_port, healthy=service.healthy, ready=service.ready
        ) as health:
            service.metrics_port = health.port
            log.info("rollout service %s on %s, health on port %d", worker.name, settings.platform, health.port)
            async with serving(service.inference, settings.bind_host, settings.inference_port, token) as port:
                service.inference_address = address(settings.advertise_host or settings.bind_host, port)
                loops = {"attach": service.attach, "heartbeat": service.heartbeat, "watchdog": service.watchdog}
                await run_service(worker.drain, loops, drain_timeout_s=settings.drain_timeout_s)
