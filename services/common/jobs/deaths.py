"""Deaths of processes that served a job: the evidence by which a job fails when its workers cannot stay alive.

serving ──► a mark: this worker serves the job ──┬─ served ──► the mark is removed: an orderly detach
                                                 ├─ report ──► a death with its cause; the mark is removed
                                                 └─ killed ──► the worker's next process finds the mark (report_killed) ──► a death

A stack that ended as a whole (its machine, its supervisor) is no evidence against a job: marks from before that are removed, not counted.
"""

from __future__ import annotations

import json
import logging
import os
import time
from dataclasses import asdict, dataclass

from pydantic import TypeAdapter, ValidationError
from redis.asyncio import Redis

from services.common.redis import keys
from services.common.redis.connection import text
from services.common.service.heartbeat import REMEMBERED_S
from services.common.service.host import boot_id
from services.common.service.logs import log_context

log = logging.getLogger(__name__)

MOST_DEATHS = 50
KEPT_S = 24 * 3600
"""Time for which a job's deaths are kept after the newest, seconds."""
CAUSE_CHARS = 500
KILLED = "its process was killed, or its machine failed"


@dataclass(frozen=True, slots=True)
class Death:
    """One end of a process while it served a job.

    Example: Death("rollout-0", "the engine does not start: ValueError: Head size 16 is not supported", 1795348800.0, loading=True)
    """

    worker: str
    cause: str
    """One line for people: the last line of the engine, a signal, or an exception."""
    at: float
    """Unix seconds."""
    loading: bool
    """It ended before it worked for this job: its engine did not start, or its tokenizer cannot be loaded."""


_DEATH = TypeAdapter(Death)

_REPORT = """#!lua
-- KEYS: deaths, serving   ARGV: death, job, how many are kept, seconds to keep them
if not redis.call('LPOS', KEYS[1], ARGV[1]) then redis.call('RPUSH', KEYS[1], ARGV[1]) end
redis.call('LTRIM', KEYS[1], -tonumber(ARGV[3]), -1)
redis.call('EXPIRE', KEYS[1], ARGV[4])
redis.call('HDEL', KEYS[2], ARGV[2])
"""


async def serving(redis: Redis, job_id: str, worker: str, *, loading: bool) -> None:
    """Sets the mark that this process serves the job: at first `loading`, later not."""
    key = keys.serving(worker)
    await redis.hset(key, job_id, json.dumps({"loading": loading, "origin": _origin()}))
    await redis.expire(key, REMEMBERED_S)


async def served(redis: Redis, job_id: str, worker: str) -> None:
    """Removes the mark, after the worker has detached from the job in an orderly way."""
    await redis.hdel(keys.serving(worker), job_id)


async def report(redis: Redis, job_id: str, death: Death) -> None:
    """Adds a death, and removes the worker's mark. The cause becomes one line of at most `CAUSE_CHARS`."""
    entry = json.dumps(asdict(death) | {"cause": " ".join(death.cause.split())[:CAUSE_CHARS]}, ensure_ascii=False)
    names = [keys.deaths(job_id), keys.serving(death.worker)]
    await redis.register_script(_REPORT)(keys=names, args=[entry, job_id, MOST_DEATHS, KEPT_S])


async def report_killed(redis: Redis, worker: str) -> None:
    """Turns each mark that an earlier process of this worker left into a death, unless the whole stack ended with it."""
    for raw_job, raw_mark in (await redis.hgetall(keys.serving(worker))).items():
        job_id = text(raw_job)
        loading, origin = _read_mark(raw_mark)
        with log_context(job_id=job_id):
            if origin != _origin():
                log.info("%s served job %s when its whole stack ended", worker, job_id)
                await served(redis, job_id, worker)
                continue
            log.warning("%s died while it %s job %s: %s", worker, "loaded" if loading else "served", job_id, KILLED)
        await report(redis, job_id, Death(worker, KILLED, time.time(), loading))


async def deaths(redis: Redis, job_id: str) -> list[Death]:
    """The newest deaths, oldest first; an entry that cannot be read is logged and left out."""
    found = []
    for raw in await redis.lrange(keys.deaths(job_id), 0, -1):
        try:
            found.append(_DEATH.validate_json(raw))
        except ValidationError as error:
            log.warning("a death of job %s cannot be read: %s", job_id, error.errors(include_url=False)[0]["msg"])
    return found


def _origin() -> str:
    """Boot and parent process: the same for the next process of this worker, unless the machine or the whole stack ended between them."""
    return f"{boot_id()}:{os.getppid()}"


def _read_mark(raw: bytes | str) -> tuple[bool, str]:
    """`loading` and `origin` of a mark; a mark that cannot be read has no origin, and is not counted."""
    try:
        mark = json.loads(raw)
        return bool(mark["loading"]), str(mark["origin"])
    except (ValueError, KeyError, TypeError):
        return False, ""
