"""A Redis that can be read and takes no writes: nobody can write the reason into a job's record, so that the gateway says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from redis.asyncio import Redis

from services.common.job_records import LIVE, JobRecord

CAUSE = "Redis takes no writes: its disk is full or cannot be written; everything waits, and goes on when there is space again"


def refused(persistence: Mapping[str, Any]) -> bool:
    """Whether the last write to the append-only file failed, as INFO has it: then Redis refuses every command that writes."""
    return str(persistence.get("aof_last_write_status", "ok")) != "ok"


async def with_cause(redis: Redis, record: JobRecord) -> JobRecord:
    """The record, with this cause where it says none and the job is a learner's."""
    if record.cause or record.state not in LIVE or not refused(await redis.info("persistence")):
        return record
    return replace(record, cause=CAUSE)
