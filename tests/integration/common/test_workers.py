from __future__ import annotations

import pytest
from redis.asyncio import Redis

from services.common import keys
from services.common.workers import WorkerKind, WorkerStatus, alive, beat, leave


async def test_workers_are_listed_by_name_until_they_leave(redis: Redis) -> None:
    for name in ("rollout-1", "reward-0"):
        await beat(redis, WorkerStatus(name, WorkerKind.ROLLOUT, "idle"))
    assert [status.name for status in await alive(redis)] == ["reward-0", "rollout-1"]
    await leave(redis, "reward-0")
    assert [status.name for status in await alive(redis)] == ["rollout-1"]


async def test_a_worker_without_a_heartbeat_is_forgotten(redis: Redis) -> None:
    await beat(redis, WorkerStatus("gone", WorkerKind.REWARD, "idle"))
    await redis.delete(keys.worker("gone"))
    assert await alive(redis) == []
    assert await redis.smembers(keys.WORKERS) == set()


@pytest.mark.parametrize("heartbeat", [b"", b"{", b"[]", b'{"name": 1}'])
async def test_a_heartbeat_that_cannot_be_read_hides_no_other(
    redis: Redis, heartbeat: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    await beat(redis, WorkerStatus("good", WorkerKind.REWARD, "idle"))
    await redis.sadd(keys.WORKERS, "bad")
    await redis.set(keys.worker("bad"), heartbeat)
    assert [status.name for status in await alive(redis)] == ["good"]
    assert "the heartbeat of bad cannot be read" in caplog.text
