"""Worker process: the parts that every rollout, reward and environment server opens at its start and closes at its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from redis.asyncio import Redis

from services.common.config.settings import Settings
from services.common.redis.connection import BLOCK_S, connect
from services.common.redis.fencing import Fence
from services.common.service.heartbeat import remove_worker, take_incarnation
from services.common.service.lifecycle import Drain
from services.common.service.preflight import require_redis
from services.common.service.tracing import close_tracing, configure_tracing

CONNECTIONS = 8
"""Most connections of a worker's commands. One hop in each keeps Redis busy; a Redis takes 10,000 connections, of all workers together."""


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """Parts of every worker."""

    commands: Redis
    blocking: Redis
    """For blocking reads only."""
    name: str
    """Stable: the next process of this worker has the same."""
    fence: Fence
    """This process's right to the name."""
    drain: Drain


@asynccontextmanager
async def worker_process(settings: Settings, service: str, drain: Drain | None = None) -> AsyncIterator[WorkerProcess]:
    """Opens a worker's parts; removes it from the list of workers at the end. Raises ConfigError when Redis cannot be used.

    `service`: rollout, reward or environment. `drain`: by default a new one, which SIGTERM and SIGINT request.
    """
    if drain is None:
        drain = Drain()
        drain.on_signals()
    configure_tracing(settings, service)
    url, password = settings.redis_url, settings.redis_password
    async with (
        connect(url, password=password, max_connections=CONNECTIONS) as commands,
        connect(url, password=password, block_s=BLOCK_S) as blocking,
    ):
        await require_redis(url, password, wait_s=settings.redis_wait_s)
        name = settings.worker_name(service)
        fence = await take_incarnation(commands, name)
        try:
            yield WorkerProcess(commands, blocking, name, fence, drain)
        finally:
            await remove_worker(commands, name, fence)
            await asyncio.to_thread(close_tracing)
