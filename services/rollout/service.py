"""Loops of the rollout service: they attach to a job, sample its tasks, and take its new weights meanwhile.

active jobs (Redis) ── attach ──► engine (vLLM), one job at a time
                                     ▲      │
learner ── Watch ──► weights: fetch ─┘      │ pieces, stamped with the version that sampled them
           (gRPC)    verify · activate      ▼
tasks stream ──────► task loop ──► sampler ──► group ── hop ──► rollouts stream

gateway ── Generate (gRPC) ──► policies ──► queue ──► engine: chats, at a lower priority than rollouts

heartbeat: this worker's entry in the list, gauges        watchdog: kills an engine that hangs, and the process ends

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
from services.common.service.heartbeat import HEARTBEAT_S, WorkerKind, WorkerStatus, live_workers, write_heartbeat
from services.common.service.lifecycle import Drain, every, run_service
from services.common.service.logs import log_context
from services.common.service.preflight import require_memory, require_platform
from services.common.service.worker import worker_process
from services.common.streams.stream import forget
from services.rollout import metrics
from services.rollout.chat.exports import ExportLoader
from services.rollout.chat.policies import Policies
from services.rollout.chat.queue import ChatQueue
from services.rollout.chat.server import InferenceService, serving
from services.rollout.engine.engine import Engine
from services.rollout.engine.health import EngineMonitor
from services.rollout.engine.process import CHAT_PLACES
from services.rollout.engine.update import EngineError
from services.rollout.session import JobSession, Wiring, choose

log = logging.getLogger(__name__)

RETRY_INTERVAL_S = 30.0
"""A job whose model does not load here is tried again after this."""
_TROUBLE_CHARS = 500
_REPORT_TIMEOUT_S = 5.0
_NOT_JOB_ERRORS = (RedisError, Fenced, RecordGone, OSError)
"""Errors that end this process and are not counted against the job that it serves."""


class RolloutService:
    """The loops of the process."""

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring
        self._session: JobSession | None = None
        self._serving: asyncio.Task[None] | None = None
        self._refused: dict[str, float] = {}
        self._sampled = False
        """Whether a token of the attached job was sampled."""
        self._death_counted = False
        """Whether the error that ends this process was counted against the attached job."""
        self._trouble = ""
        """Why the newest job could not be served."""
        self._state = ("", 0.0)
        """State in the newest heartbeat, and since when."""
        store = JobStore(wiring.commands)
        self._follower = JobFollower(store, wiring.drain)
        self.metrics_port: int | None = None
        """Port of /metrics, for the list of workers."""
        self.inference_address: str | None = None
        """Address of the chat server, for the gateway."""
        queue = ChatQueue(CHAT_PLACES)
        loader = ExportLoader(wiring.engine, wiring.settings, wiring.commands, wiring.name)
        self._policies = Policies(wiring.engine, queue, store, loader.load)
        self.inference = InferenceService(wiring.engine, self._policies, queue)
        self._monitor = EngineMonitor(wiring.engine)
        self._hang: str | None = None

    def healthy(self) -> str | None:
        """Why the process should be restarted, or None."""
        return self._follower.healthy() or self._hang

    def ready(self) -> str | None:
        """Why it takes no work, or None. A load does not count, however long it takes: the heartbeat reports it."""
        return self._follower.ready()

    async def attach(self) -> None:
        """Serves one job at a time.

        Consumes:     the active jobs.
        Waits for:    changes of the active jobs, and the end of the attached job's loops.
        Unblocked by: the learner (it activates and retires jobs), or a drain.
        Produces:     sessions. Returns on drain, when the groups in flight are done.
        """
        try:
            await self._follower.run(self._look)
            if self._serving is not None and self._session is not None and self._session.state != "loading":
                await self._serving
        finally:
            await self._policies.drain()
            await self._detach()

    async def heartbeat(self) -> None:
        """Reports that the worker lives.

        Consumes:     nothing.
        Waits for:    the next heartbeat.
        Unblocked by: time.
        Produces:     the entry in the list of workers, and gauges.
        """
        await every(HEARTBEAT_S, self._wiring.drain, self._beat)

    async def watchdog(self) -> None:
        """Kills an engine that makes no progress, and ends the process.

        Consumes:     the time of the engine's newest token.
        Waits for:    the next check.
        Unblocked by: time.
        Produces:     EngineError.
        """
        try:
            await every(1.0, self._wiring.drain, self._check_engine)
        except EngineError as error:
            await self._count_death(error)
            raise
        finally:
            self._monitor.close()

    async def _look(self, active: dict[str, ActiveJob]) -> None:
        if self._session is not None and self._serving is not None:
            job = active.get(self._session.job.job_id)
            if self._serving.done():
                await self._handle_end(self._session.job.job_id, self._serving)
            elif job is None:
                log.info("job %s is retired", self._session.job.job_id)
                await self._detach()
            else:
                self._session.update(job)
                if self._wiring.engine.sampled and not self._sampled:  # from now on an end is no failed start
                    self._sampled = True
                    await deaths.serving(self._wiring.commands, job.job_id, self._wiring.name, loading=False)
        if self._session is None:
            now = time.monotonic()
            self._refused = {job_id: until for job_id, until in self._refused.items() if until > now}
            open_jobs = {job_id: job for job_id, job in active.items() if job_id not in self._refused}
            job = choose(open_jobs, await live_workers(self._wiring.commands), self._wiring.name) if open_jobs else None
            if job is not None:
                await self._attach(job)

    async def _attach(self, job: ActiveJob) -> None:
        await self._policies.claim(job.job_id)
        log.info("attaching to job %s", job.job_id)
        self._sampled = False
        await deaths.serving(self._wiring.commands, job.job_id, self._wiring.name, loading=True)
        self._session = JobSession(self._wiring, job)
        self._serving = asyncio.create_task(self._session.run(), name=f"job {job.job_id}")

    async def _handle_end(self, job_id: str, serving: asyncio.Task[None]) -> None:
        """Handles a session that ended by itself: raises its error, unless only the job or a setting caused it."""
        try:
            serving.result()
        except ConfigError as error:
            with log_context(job_id=job_id):
                log.exception("job %s cannot be served here", job_id)
                self._refused[job_id] = time.monotonic() + RETRY_INTERVAL_S
                self._trouble = f"{self._wiring.name} cannot serve job {job_id}: {error}"[:_TROUBLE_CHARS]
                if isinstance(error, ModelError):
                    await self._count_death(error)
            await self._detach()
            self._death_counted = False  # this process goes on
        except _NOT_JOB_ERRORS:
            raise
        except Exception as error:
            await self._count_death(error)
            raise
        else:
            if not self._wiring.drain.requested:
                raise MillraceError(f"the loops of job {job_id} ended without being asked to")

    async def _count_death(self, error: Exception) -> None:
        """Counts the end of this server's work against the attached job, once; the cause ends with the engine's own last error."""
        session, engine = self._session, self._wiring.engine
        if session is None or self._death_counted:
            return
        self._death_counted = True
        cause = str(error) if isinstance(error, MillraceError) else f"{type(error).__name__}: {error}"
        engine_error = await engine.last_error()
        cause = cause if engine_error in cause else f"{cause}: {engine_error}"
        death = deaths.Death(self._wiring.name, cause, time.time(), loading=not self._sampled)
        with log_context(job_id=session.job.job_id):
            log.error("%s: counted against job %s", death.cause, session.job.job_id)
        # Without Redis the mark stays, and the next process of this name counts it.
        with contextlib.suppress(TimeoutError, RedisError):
            async with asyncio.timeout(_REPORT_TIMEOUT_S):
                await deaths.report(self._wiring.commands, session.job.job_id, death)

    async def _detach(self) -> None:
        """Ends the job's loops and aborts its requests."""
        session, serving = self._session, self._serving
        if session is None or serving is None:
            return
        # First, while the engine is not paused: aborted requests need one that runs.
        await self._policies.clear("the job left this server: ask again")
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        self._session = self._serving = None
        if not self._death_counted:
            await deaths.served(self._wiring.commands, session.job.job_id, self._wiring.name)
        self._policies.release()
        await forget(self._wiring.commands, session.job.job_id)
        log.info("detached from job %s", session.job.job_id)

    def _progress_age_s(self, state: str) -> float:
        """Seconds since the last progress. Loading a model and changing weights have limits of their own: they count as progress."""
        now, engine = time.monotonic(), self._wiring.engine
        if state != self._state[0] or state in {"loading", "updating"}:
            self._state = (state, now)
        return now - max(self._state[1], engine.progress_at if engine.requests else 0.0)

    async def _check_engine(self) -> None:
        self._wiring.engine.check()
        if self._policies.fault is not None:
            raise self._policies.fault
        self._hang = self._monitor.fault()
        if self._hang is not None:
            self._wiring.engine.kill()  # calls that wait for the engine fail at once, and other servers claim the work
            raise EngineError(self._hang)

    async def _beat(self) -> None:
        session, engine = self._session, self._wiring.engine
        state = session.state if session is not None else self._policies.hosting or "idle"
        state = "draining" if self._wiring.drain.requested else state
        version, groups = engine.version, session.groups if session is not None else 0
        metrics.POLICY_VERSION.set(version.n if version is not None else -1)
        metrics.LINEAGE.set(version.lineage if version is not None else -1)
        metrics.GROUPS_IN_FLIGHT.set(groups)
        metrics.BUSY.note(engine.requests)
        detail: dict[str, str | int | float] = {"groups_in_flight": groups, "requests_in_flight": engine.requests}
        detail["chats_in_flight"] = engine.chats
        trouble = self._trouble if version is None else ""
        if version is not None and session is not None:
            trouble = session.trouble
        if trouble:
            detail["trouble"] = trouble[:_TROUBLE_CHARS]
        status = WorkerStatus(
            self._wiring.name, WorkerKind.ROLLOUT, state,
            job_id=session.job.job_id if session is not None else self._policies.hosted,
            policy_version=version.n if version is not None else None,
            metrics_port=self.metrics_port, inference_address=self.inference_address,
            progress_age_s=self._progress_age_s(state), detail=detail,
        )  # fmt: skip
        await write_heartbeat(self._wiring.commands, status, self._wiring.fence)


async def run(settings: Settings, *, drain: Drain | None = None) -> None:
    """Runs the service until the drain; `drain` is for tests, by default SIGTERM and SIGINT request one.

    Raises:
        ConfigError: the installed packages are for another platform, or Redis or a port cannot be used as the settings say.
    """
    settings.require_token_beyond_loopback(settings.internal_token, "MILLRACE_INTERNAL_TOKEN")
    require_platform(settings.platform)
    require_memory(settings.min_memory_gib)
    token = settings.internal_secret
    async with (
        worker_process(settings, "rollout", drain) as worker,
        aclosing(Engine(settings.platform, settings.log_level)) as engine,
    ):
        await deaths.report_killed(worker.commands, worker.name)
        wiring = Wiring(worker.commands, worker.blocking, engine, settings, worker.name, worker.drain, worker.fence)
        service = RolloutService(wiring)
        host = settings.bind_host
        with HealthServer(host, settings.metrics_port, healthy=service.healthy, ready=service.ready) as health:
            service.metrics_port = health.port
            log.info("rollout service %s on %s, health on port %d", worker.name, settings.platform, health.port)
            async with serving(service.inference, host, settings.inference_port, token) as port:
                service.inference_address = address(settings.advertise_host or host, port)
                loops = {"attach": service.attach, "heartbeat": service.heartbeat, "watchdog": service.watchdog}
                await run_service(worker.drain, loops, drain_timeout_s=settings.drain_timeout_s)
