"""Worker process: what the processes that read work streams open when they start, and close when they end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from redis.asyncio import Redis

from services.common.config.settings import Settings
from services.common.redis.connection import BLOCK_S, connect
from services.common.redis.fencing import Fence
from services.common.service.heartbeat import begin, leave
from services.common.service.lifecycle import Drain
from services.common.service.preflight import require_redis


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """The parts that every worker has."""

    commands: Redis
    blocking: Redis
    """Only ever waits for entries."""
    name: str
    """Stable: the next process of this worker has the same."""
    fence: Fence
    """This process's right to the name."""
    drain: Drain


@asynccontextmanager
async def worker_process(settings: Settings, service: str, drain: Drain | None = None) -> AsyncIterator[WorkerProcess]:
    """Opens a worker's parts; takes it off the list of workers in the end.

    Args:
        settings: of the process.
        service: rollout or reward.
        drain: requested by others (tests); by default by SIGTERM and SIGINT.

    Raises:
        ConfigError: Redis cannot be used as the settings say.
    """
    if drain is None:
        drain = Drain()
        drain.on_signals()
    commands = connect(settings.redis_url, password=settings.redis_password)
    blocking = connect(settings.redis_url, password=settings.redis_password, block_s=BLOCK_S)
    try:
        await require_redis(settings.redis_url, settings.redis_password, wait_s=settings.redis_wait_s)
        name = settings.worker_name(service)
        fence = await begin(commands, name)
        try:
            yield WorkerProcess(commands, blocking, name, fence, drain)
        finally:
            await leave(commands, name, fence)
    finally:
        await blocking.aclose()
        await commands.aclose()
