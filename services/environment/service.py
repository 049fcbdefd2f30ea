"""Service that plays episodes: it listens, and says in the list of workers where."""

from __future__ import annotations

import asyncio
import logging

from services.common.config.settings import Settings, address
from services.common.programs.sandbox import log_isolation
from services.common.sandbox.pool import Sandbox
from services.common.service.health import HealthServer
from services.common.service.heartbeat import HEARTBEAT_S, WorkerKind, WorkerStatus, write_heartbeat
from services.common.service.lifecycle import Drain, every, run_service
from services.common.service.worker import WorkerProcess, worker_process
from services.environment import switches
from services.environment.players import Players
from services.environment.server import EnvironmentService, serving

log = logging.getLogger(__name__)

_PREPARE = "services.environment.player:prepare"


class Registration:
    """This server's entry in the list of workers."""

    def __init__(self, worker: WorkerProcess, players: Players, where: str, metrics_port: int) -> None:
        """`where`: host:port of its gRPC server, as others reach it."""
        self._worker, self._players, self._where, self._metrics_port = worker, players, where, metrics_port

    async def heartbeat(self) -> None:
        """Beats until the last episode has ended.

        Consumes:     nothing.
        Waits for:    the next beat; after the drain, the ends of the episodes.
        Unblocked by: time, and rollout servers.
        Produces:     this worker's entry, without an address from the drain on: no new episode comes.
        """
        await every(HEARTBEAT_S, self._worker.drain, self._beat)
        await self._beat()
        # A rollout server that looked at the list before the drain may still begin one.
        await asyncio.sleep(HEARTBEAT_S)
        while self._players.playing:
            await self._beat()
            await asyncio.sleep(HEARTBEAT_S)

    async def _beat(self) -> None:
        playing, drain = self._players.playing, self._worker.drain
        state = "draining" if drain.requested else "playing" if playing else "idle"
        status = WorkerStatus(
            self._worker.name, WorkerKind.ENVIRONMENT, state, metrics_port=self._metrics_port,
            environment_address=None if drain.requested else self._where, detail={"episodes_in_flight": playing},
        )  # fmt: skip
        await write_heartbeat(self._worker.commands, status, self._worker.fence)
        await self._players.end_idle()


async def run(settings: Settings, *, drain: Drain | None = None) -> None:
    """Runs the service until the drain, which SIGTERM and SIGINT request.

    Raises:
        ConfigError: Redis or a port cannot be used as the settings say, or a token is missing beyond loopback.
    """
    settings.require_token_beyond_loopback(settings.internal_token, "MILLRACE_INTERNAL_TOKEN")
    token = settings.internal_secret
    async with (
        worker_process(settings, "environment", drain) as worker,
        Sandbox(
            prepare=[_PREPARE],
            service="environment",
            log_level=settings.log_level,
            environment=switches.variables(settings),
        ) as sandbox,
    ):
        await log_isolation(settings.code_environment)
        await sandbox.start()
        players, host = Players(sandbox, places=settings.environment_places), settings.bind_host
        service = EnvironmentService(players, memory_mib=settings.environment_memory_mib)
        with HealthServer(host, settings.metrics_port, healthy=lambda: None, ready=lambda: None) as health:
            async with serving(service, host, settings.environment_port, token) as port:
                where = address(settings.advertise_host or host, port)
                registration = Registration(worker, players, where, health.port)
                log.info("environment service %s on %s, health on port %d", worker.name, where, health.port)
                loops = {"heartbeat": registration.heartbeat}
                await run_service(worker.drain, loops, drain_timeout_s=settings.drain_timeout_s)
