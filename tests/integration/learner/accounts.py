"""A job's accounts: in its journal, in its record and in its history."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from redis.asyncio import Redis

from services.common.jobs.record import JobRecord, JobState
from services.common.redis import keys
from services.common.streams.codec import decode
from services.common.streams.limits import MIN_ENTRY_BYTES
from services.common.streams.types import ScoredGroup
from services.learner.storage.journal import Journal


def trained(home: Path, job_id: str) -> list[list[int]]:
    """Group ids by step, as the journal has them; its last record may carry fates only."""
    records = [record for record in Journal(home / "jobs" / job_id / "journal").records() if record.groups]
    return [
        [decode(ScoredGroup, payload, MIN_ENTRY_BYTES).group.task.group_id for payload in record.groups]
        for record in records
    ]


async def check_accounts(redis: Redis, home: Path, ended: JobRecord, steps: int) -> None:
    """The job succeeded, each step is there once, and every group has one fate, none of them failed or stale."""
    assert (ended.state, ended.step) == (JobState.SUCCEEDED, steps)
    groups = trained(home, ended.id)
    assert len(groups) == steps
    assert max(Counter(group_id for step in groups for group_id in step).values()) == 1
    fates = {name: count for name, count in ended.groups.items() if name not in {"issued", "active"}}
    assert (sum(fates.values()), ended.groups["active"]) == (ended.groups["issued"], 0)
    assert fates["trained"] == sum(map(len, groups))
    assert fates["failed"] == fates["stale"] == 0
    history = [json.loads(raw)["step"] for raw in await redis.lrange(keys.steps(ended.id), 0, -1)]
    assert history == list(range(1, steps + 1))
