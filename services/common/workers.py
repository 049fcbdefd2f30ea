"""Who is there: every service writes a heartbeat that expires by itself."""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from dataclasses import asdict, dataclass, field
from enum import StrEnum

from pydantic import TypeAdapter, ValidationError
from redis.asyncio import Redis

from services.common import keys
from services.common.connection import text

log = logging.getLogger(__name__)

HEARTBEAT_S = 2.0
EXPIRES_S = 15.0


class WorkerKind(StrEnum):
    """The service that a worker is."""

    ROLLOUT = "rollout"
    REWARD = "reward"
    LEARNER = "learner"


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker's heartbeat."""

    name: str
    kind: WorkerKind
    state: str
    """A word for people: idle, loading, sampling, updating, training …"""
    job_id: str | None = None
    policy_version: int | None = None
    metrics_port: int | None = None
    inference_address: str | None = None
    """host:port of a rollout server's gRPC for chats."""
    progress_age_s: float | None = None
    """Seconds since its work last moved (a token, a verdict, another state); None when it has none in hand."""
    detail: dict[str, str | int | float] = field(default_factory=dict)
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    at: float = field(default_factory=time.time)
    """Unix seconds of this heartbeat."""


_STATUS = TypeAdapter(WorkerStatus)


async def beat(redis: Redis, status: WorkerStatus) -> None:
    """Writes a heartbeat, good for EXPIRES_S seconds."""
    await redis.set(keys.worker(status.name), json.dumps(asdict(status)), px=int(EXPIRES_S * 1000))
    await redis.sadd(keys.WORKERS, status.name)


async def leave(redis: Redis, name: str) -> None:
    """Takes a worker off the list at once, on drain."""
    await redis.delete(keys.worker(name))
    await redis.srem(keys.WORKERS, name)


async def alive(redis: Redis) -> list[WorkerStatus]:
    """Workers whose heartbeat has not expired, by name; forgets the others. A heartbeat that cannot be read is told in the log."""
    found = []
    for raw in sorted(await redis.smembers(keys.WORKERS)):
        value = await redis.get(keys.worker(text(raw)))
        if value is None:
            await redis.srem(keys.WORKERS, raw)
            continue
        try:
            found.append(_STATUS.validate_json(value))
        except ValidationError as error:
            log.warning("the heartbeat of %s cannot be read: %s", text(raw), error.errors(include_url=False)[0]["msg"])
    return found
