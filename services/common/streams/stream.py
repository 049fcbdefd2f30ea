"""Work stream of a job in Redis: addition, deletion and depth of entries.

    producer ── add ──►  stream  ──► consumer (consumer.py) ──► next stream
               (bound, dedupe)

A stream is never trimmed: a full one refuses an entry, and the producer waits.
"""

from __future__ import annotations

from redis.asyncio import Redis

from services.common.errors import StreamFull
from services.common.redis import keys
from services.common.redis.fencing import Fence, run
from services.common.redis.keys import Stage
from services.common.streams import lua

MAX_STREAM_LENGTH = 100_000
"""Default bound of a work stream, entries. The learner's slots keep streams far shorter."""


async def add(
    redis: Redis,
    job_id: str,
    stage: Stage,
    member: str,
    payload: bytes,
    *,
    bound: int = MAX_STREAM_LENGTH,
    fence: Fence | None = None,
) -> bool:
    """Adds an entry once, however often it is called; False when it had been added before.

    Raises:
        StreamFull: the stream holds `bound` entries; nothing was changed.
        Fenced: a newer process writes in this one's place.
    """
    names = [keys.stream(job_id, stage), keys.seen(job_id, stage)]
    done = await run(redis, lua.ADD, names, [member, payload, bound], fence=fence)
    if done == -1:
        raise StreamFull(f"stream {stage} of job {job_id} holds {bound} entries")
    return bool(done)


async def forget(redis: Redis, job_id: str) -> None:
    """Deletes the streams of a retired job that a read or a hop in flight made again. An active job keeps its streams."""
    await redis.register_script(lua.FORGET)(keys=keys.work(job_id), args=[keys.ACTIVE, job_id])


async def depths(redis: Redis, job_id: str) -> dict[Stage, int]:
    """Entries in each work stream, unread and unacked together."""
    return {stage: await redis.xlen(keys.stream(job_id, stage)) for stage in Stage}
