"""History of a job, from Redis while it is there, else from the job's folder."""

from __future__ import annotations

import asyncio
import json
import logging
from itertools import islice
from pathlib import Path

from services.common.jobs.elements import json_objects
from services.common.jobs.folder import JobFolder
from services.common.jobs.kept_samples import key_of, read_kept
from services.common.jobs.record import JobRecord
from services.common.jobs.retention import is_archived
from services.common.redis import keys
from services.gateway.dependencies import Context
from services.gateway.samples import SampleFilter
from services.gateway.schemas import History, OpenObject

log = logging.getLogger(__name__)

MAX_EVALS = 1000
"""Evaluations of one answer, the newest."""
CHUNK = 1000


async def read_history(context: Context, record: JobRecord, first: int | None, limit: int) -> History:
    """The steps from step `first` on, at most `limit`, without `first` the newest; and the evaluations."""
    if await is_archived(context.redis, record):
        return await asyncio.to_thread(_from_folder, context.settings.job_dir(record.id), first, limit)
    name = keys.steps(record.id)
    total = int(await context.redis.llen(name))
    evals = json_objects(await context.redis.lrange(keys.evals(record.id), -MAX_EVALS, -1))
    if first is None:
        return History(total=total, steps=json_objects(await context.redis.lrange(name, -limit, -1)), evals=evals)
    steps: list[OpenObject] = []
    position = first - 1  # step n is at index n - 1, or further on when steps were repeated after a rollback
    while len(steps) < limit and position < total:
        chunk = json_objects(await context.redis.lrange(name, position, position + CHUNK - 1))
        steps += [item for item in chunk if _step(item) >= first]
        position += CHUNK
    return History(total=total, steps=steps[:limit], evals=evals)


async def read_samples(
    context: Context, record: JobRecord, wanted: SampleFilter, limit: int
) -> list[dict[str, object]]:
    """The wanted groups, newest first, at most `limit`: from Redis, then from the job's folder."""
    newest = json_objects(await context.redis.lrange(keys.samples(record.id), 0, -1))
    found = list(islice(wanted.select(newest), limit))
    if len(found) < limit:
        kept = await asyncio.to_thread(read_kept, context.settings.job_dir(record.id))
        known = {key_of(sample) for sample in newest}
        older = wanted.select(sample for sample in reversed(kept) if key_of(sample) not in known)
        found += islice(older, limit - len(found))
    return found


def _from_folder(folder: Path, first: int | None, limit: int) -> History:
    """History of a job whose data in Redis is gone."""
    history = JobFolder(folder).history()
    steps = json_objects(json.dumps(step) for step in history.steps)
    page = steps[-limit:] if first is None else [item for item in steps if _step(item) >= first][:limit]
    evals = json_objects(json.dumps(record) for record in history.evals[-MAX_EVALS:])
    return History(total=len(steps), steps=page, evals=evals)


def _step(item: OpenObject) -> float:
    """The record's step; infinity without one, so that no filter hides it."""
    step = item.get("step")
    return step if isinstance(step, int | float) else float("inf")
