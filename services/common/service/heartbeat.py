"""Heartbeats of the workers: keys in Redis that expire; only the newest process of a worker's name may write its heartbeat."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from dataclasses import asdict, dataclass, field
from enum import StrEnum

from pydantic import TypeAdapter, ValidationError
from redis.asyncio import Redis

from services.common.errors import Fenced
from services.common.redis import keys
from services.common.redis.connection import text
from services.common.redis.fencing import FENCE, Fence, run

log = logging.getLogger(__name__)

HEARTBEAT_S = 2.0
EXPIRES_S = 15.0
REMEMBERED_S = 7 * 24 * 3600
"""Lifetime of a name's incarnation after its last heartbeat; a process that wakes up later has lost its work anyway."""


class WorkerKind(StrEnum):
    """The service that a worker is."""

    ROLLOUT = "rollout"
    REWARD = "reward"
    LEARNER = "learner"
    ENVIRONMENT = "environment"


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker's heartbeat."""

    name: str
    kind: WorkerKind
    state: str
    """For people: idle, loading, sampling, updating, training …"""
    job_id: str | None = None
    policy_version: int | None = None
    metrics_port: int | None = None
    inference_address: str | None = None
    """host:port of a rollout server's gRPC server for chats."""
    environment_address: str | None = None
    """host:port of an environment server's gRPC server for episodes."""
    progress_age_s: float | None = None
    """Seconds since its work last made progress (a token, a verdict, another state); None when it has no work."""
    detail: dict[str, str | int | float] = field(default_factory=dict)
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    at: float = field(default_factory=time.time)
    """Unix seconds of this heartbeat."""


_STATUS = TypeAdapter(WorkerStatus)

_TAKE_INCARNATION = """#!lua
-- KEYS: incarnation   ARGV: seconds to keep it
local taken = redis.call('HINCRBY', KEYS[1], 'incarnation', 1)
redis.call('EXPIRE', KEYS[1], ARGV[1])
return taken
"""

_KEEP_INCARNATION = """#!lua
-- KEYS: incarnation   ARGV: one that was taken, seconds to keep it
if tonumber(redis.call('HGET', KEYS[1], 'incarnation') or 0) < tonumber(ARGV[1]) then
  redis.call('HSET', KEYS[1], 'incarnation', ARGV[1])
end
redis.call('EXPIRE', KEYS[1], ARGV[2])
"""

_WRITE_HEARTBEAT = f"""{FENCE}
-- KEYS: heartbeat, workers, incarnation   ARGV: …, name, heartbeat, milliseconds it is good for, seconds to keep the incarnation
redis.call('SET', KEYS[1], ARGV[4], 'PX', ARGV[5])
redis.call('SADD', KEYS[2], ARGV[3])
redis.call('EXPIRE', KEYS[3], ARGV[6])
"""

_REMOVE_WORKER = f"""{FENCE}
-- KEYS: heartbeat, workers   ARGV: …, name
redis.call('DEL', KEYS[1])
redis.call('SREM', KEYS[2], ARGV[3])
"""


async def take_incarnation(redis: Redis, name: str) -> Fence:
    """Takes the name's next incarnation: from then on no older process of this name can write."""
    key = keys.incarnation(name)
    taken = int(await redis.register_script(_TAKE_INCARNATION)(keys=[key], args=[REMEMBERED_S]))

    async def keep() -> None:
        await redis.register_script(_KEEP_INCARNATION)(keys=[key], args=[taken, REMEMBERED_S])

    return Fence(f"worker {name}", key, taken, keep)


async def write_heartbeat(redis: Redis, status: WorkerStatus, fence: Fence | None = None) -> None:
    """Writes a heartbeat that expires after EXPIRES_S. Raises Fenced when a newer process has the name."""
    names = [keys.worker(status.name), keys.WORKERS, keys.incarnation(status.name)]
    arguments = [status.name, json.dumps(asdict(status)), int(EXPIRES_S * 1000), REMEMBERED_S]
    await run(redis, _WRITE_HEARTBEAT, names, arguments, fence=fence)


async def remove_worker(redis: Redis, name: str, fence: Fence | None = None) -> None:
    """Removes a worker from the list at once, on drain; does nothing when a newer process has its name."""
    with contextlib.suppress(Fenced):
        await run(redis, _REMOVE_WORKER, [keys.worker(name), keys.WORKERS], [name], fence=fence)


async def live_workers(redis: Redis) -> list[WorkerStatus]:
    """Workers whose heartbeat has not expired, by name; removes the others. A heartbeat that cannot be read is logged."""
    names = sorted(await redis.smembers(keys.WORKERS))
    async with redis.pipeline(transaction=False) as pipe:
        for raw in names:
            pipe.get(keys.worker(text(raw)))
        values = await pipe.execute() if names else []
    found, gone = [], [raw for raw, value in zip(names, values, strict=True) if value is None]
    for raw, value in zip(names, values, strict=True):
        try:
            found += [] if value is None else [_STATUS.validate_json(value)]
        except ValidationError as error:
            log.warning("the heartbeat of %s cannot be read: %s", text(raw), error.errors(include_url=False)[0]["msg"])
    if gone:
        await redis.srem(keys.WORKERS, *gone)
    return found
