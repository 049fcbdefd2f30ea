from __future__ import annotations

from typing import Any

import pytest
from redis.asyncio import Redis

from services.common.errors import Fenced
from services.common.redis import keys
from services.common.service.heartbeat import (
    WorkerKind,
    WorkerStatus,
    live_workers,
    remove_worker,
    take_incarnation,
    write_heartbeat,
)


async def test_workers_are_listed_by_name_until_they_leave(redis: Redis) -> None:
    for name in ("rollout-1", "reward-0"):
        await write_heartbeat(redis, WorkerStatus(name, WorkerKind.ROLLOUT, "idle"))
    assert [status.name for status in await live_workers(redis)] == ["reward-0", "rollout-1"]
    await remove_worker(redis, "reward-0")
    assert [status.name for status in await live_workers(redis)] == ["rollout-1"]


async def test_a_worker_without_a_heartbeat_is_forgotten(redis: Redis) -> None:
    await write_heartbeat(redis, WorkerStatus("gone", WorkerKind.REWARD, "idle"))
    await redis.delete(keys.worker("gone"))
    assert await live_workers(redis) == []
    assert await redis.smembers(keys.WORKERS) == set()


async def test_many_workers_are_listed_in_two_round_trips(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"rollout-{number:03d}" for number in range(300)]
    for name in names:
        await write_heartbeat(redis, WorkerStatus(name, WorkerKind.ROLLOUT, "idle"))
    sent: list[str] = []
    send = redis.execute_command

    def noted(*args: Any, **options: Any) -> Any:
        sent.append(args[0])
        return send(*args, **options)  # type: ignore[no-untyped-call]  # redis-py

    monkeypatch.setattr(redis, "execute_command", noted)
    assert [status.name for status in await live_workers(redis)] == names
    assert sent == ["SMEMBERS"]  # what goes with it goes in one pipeline


@pytest.mark.parametrize("heartbeat", [b"", b"{", b"[]", b'{"name": 1}'])
async def test_a_heartbeat_that_cannot_be_read_hides_no_other(
    redis: Redis, heartbeat: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    await write_heartbeat(redis, WorkerStatus("good", WorkerKind.REWARD, "idle"))
    await redis.sadd(keys.WORKERS, "bad")
    await redis.set(keys.worker("bad"), heartbeat)
    assert [status.name for status in await live_workers(redis)] == ["good"]
    assert "the heartbeat of bad cannot be read" in caplog.text


async def test_of_one_names_processes_only_the_newest_beats_and_an_older_one_that_leaves_takes_nothing_along(
    redis: Redis,
) -> None:
    old = await take_incarnation(redis, "rollout-0")
    await write_heartbeat(redis, WorkerStatus("rollout-0", WorkerKind.ROLLOUT, "idle", pid=1), old)
    new = await take_incarnation(redis, "rollout-0")
    await write_heartbeat(redis, WorkerStatus("rollout-0", WorkerKind.ROLLOUT, "idle", pid=2), new)
    with pytest.raises(Fenced, match="worker rollout-0: this process is incarnation 1"):
        await write_heartbeat(redis, WorkerStatus("rollout-0", WorkerKind.ROLLOUT, "idle", pid=1), old)
    await remove_worker(redis, "rollout-0", old)
    assert [status.pid for status in await live_workers(redis)] == [2]
    await remove_worker(redis, "rollout-0", new)
    assert await live_workers(redis) == []


async def test_a_worker_goes_on_when_redis_was_emptied_and_stays_the_newest(redis: Redis) -> None:
    old, new = await take_incarnation(redis, "reward-0"), await take_incarnation(redis, "reward-0")
    await redis.flushall()
    await write_heartbeat(redis, WorkerStatus("reward-0", WorkerKind.REWARD, "idle"), new)
    with pytest.raises(Fenced):
        await write_heartbeat(redis, WorkerStatus("reward-0", WorkerKind.REWARD, "idle"), old)
    await redis.flushall()
    await write_heartbeat(
        redis, WorkerStatus("reward-0", WorkerKind.REWARD, "idle"), old
    )  # nothing is left that knows better
    await write_heartbeat(redis, WorkerStatus("reward-0", WorkerKind.REWARD, "idle"), new)
    with pytest.raises(Fenced):
        await write_heartbeat(redis, WorkerStatus("reward-0", WorkerKind.REWARD, "idle"), old)


async def test_a_names_incarnation_is_remembered_for_long_after_its_last_heartbeat(redis: Redis) -> None:
    fence = await take_incarnation(redis, "rollout-0")
    await redis.expire(fence.record, 5)
    await write_heartbeat(redis, WorkerStatus("rollout-0", WorkerKind.ROLLOUT, "idle"), fence)
    assert await redis.ttl(fence.record) > 24 * 3600
