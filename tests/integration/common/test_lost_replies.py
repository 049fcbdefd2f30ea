"""A reply that is lost is asked for again: whatever a service sends has its effect once, and no wait outlasts its deadline."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from redis.exceptions import AuthenticationError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from services.common.jobs.record import LIVE, ActiveJob, JobState
from services.common.jobs.step_record import StepRecord
from services.common.jobs.store import JobStore
from services.common.redis import connection, keys
from services.common.redis.connection import RetryPolicy, connect, redis_unavailable
from services.common.redis.keys import Stage
from services.common.service.heartbeat import WorkerKind, WorkerStatus, live_workers, remove_worker, write_heartbeat
from services.common.spec.job import parse_spec
from services.common.streams import dead_letters, stream
from services.common.streams.consumer import Consumer
from services.common.streams.limits import MIN_ENTRY_BYTES
from services.common.streams.stream import add
from services.learner.storage.job_store import HeadStore
from services.reward.samples import keep_sample
from tests.chaos.proxy import CutProxy, server_of
from tests.own_redis import OwnRedis
from tests.unit.learner.scored_groups import scored_group

Redis = redis.asyncio.Redis
SPEC = parse_spec("name: demo\nmodel: {path: tiny}\ndata: {train: {source: 'reasoning_gym:chain_sum'}}\n")
JOB = "job-1"


HANDSHAKE = (b"HELLO", b"CLIENT", b"SELECT", b"PING")


def is_work(request: bytes) -> bool:
    """Whether it is no part of how a client connects: half of those cut would only make it connect often."""
    return not any(word in request[:64] for word in HANDSHAKE)


@pytest.fixture
async def proxy(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[CutProxy]:
    """A proxy that cuts half of the replies."""
    monkeypatch.setattr(connection, "MAX_PAUSE_S", 0.02)
    async with CutProxy(lambda: server_of(redis_url), seed=7) as made:
        made.faults.cut_reply = 0.5
        made.faults.picks = is_work
        yield made


@pytest.fixture
async def lossy(proxy: CutProxy) -> AsyncIterator[Redis]:
    client = connect(f"redis://127.0.0.1:{proxy.port}/0")
    yield client
    await client.aclose()


@pytest.fixture
async def lossy_blocking(proxy: CutProxy) -> AsyncIterator[Redis]:
    client = connect(f"redis://127.0.0.1:{proxy.port}/0", block_s=0.2)
    yield client
    await client.aclose()


async def events(redis: Redis, job_id: str) -> list[tuple[str, Any]]:
    reply: Any = await redis.xrange(keys.events(job_id))
    return [(fields[b"kind"].decode(), json.loads(fields[b"d"])) for _, fields in reply]


async def test_a_jobs_whole_course_is_told_once_through_lost_replies(
    redis: Redis, lossy: Redis, proxy: CutProxy, tmp_path: Path
) -> None:
    people = JobStore(lossy, tmp_path / "gateway")
    for number in range(4):
        job_id = (await people.create_once(SPEC, f"key-{number}"))[0].id
        await people.pause(job_id)
        await people.resume(job_id)
        store = JobStore(lossy, tmp_path)
        while (claimed := await store.claim("learner")) is None:
            pass
        assert claimed.id == job_id
        head = await HeadStore.begin(lossy, tmp_path, job_id)
        await head.activate(ActiveJob(job_id, 1, "here:1", 0, "/models/tiny", {}))
        await head.transition(JobState.RUNNING, allowed=LIVE)
        for step in range(1, 6):
            await head.update(step=step)
            await head.append_step(step, StepRecord(step=step))
            await head.append_eval({"step": step})
            await head.event("checkpoint", {"step": step})
        await head.transition(JobState.SUCCEEDED, allowed=LIVE)
        await head.retire()

        told = await events(redis, job_id)
        states = [data["state"] for kind, data in told if kind == "state"]
        assert states == ["queued", "paused", "queued", "starting", "running", "succeeded"]
        for kind in ("step", "eval", "checkpoint"):
            assert [data["step"] for name, data in told if name == kind] == [1, 2, 3, 4, 5]
        for name in (keys.steps(job_id), keys.evals(job_id)):
            assert [json.loads(raw)["step"] for raw in await redis.lrange(name, 0, -1)] == [1, 2, 3, 4, 5]
    assert await redis.zcard(keys.JOBS) == 4
    assert await redis.zcard(keys.QUEUE) == 0
    assert proxy.counts.replies_cut > 80


async def test_every_entry_goes_its_way_once_through_lost_replies(
    redis: Redis, lossy: Redis, lossy_blocking: Redis, proxy: CutProxy
) -> None:
    total = 30
    for number in range(total):
        await add(lossy, JOB, Stage.ROLLOUTS, f"train:{number}:1", b"payload")
    assert (await stream.depths(redis, JOB))[Stage.ROLLOUTS] == total
    reader = Consumer(
        lossy, lossy_blocking, JOB, Stage.ROLLOUTS, group="g", name="a", lease_s=60.0, limit_bytes=MIN_ENTRY_BYTES
    )
    handled: list[str] = []
    deadline = time.monotonic() + 60
    while len(handled) < total and time.monotonic() < deadline:
        for entry in await reader.read(8, 0.1):
            handled.append(entry.member)
            await reader.renew()
            number = int(entry.member.split(":")[1])
            if number % 10:
                await reader.hop(entry, Stage.SCORED, b"judged")
            else:
                await reader.dead_letter(entry, "spoiled")
    assert sorted(handled) == sorted(f"train:{n}:1" for n in range(total)), "each was delivered to its handler once"
    scored: Any = await redis.xrange(keys.stream(JOB, Stage.SCORED))
    assert len({fields[b"member"] for _, fields in scored}) == len(scored) == total * 9 // 10
    assert await redis.xlen(keys.dead(JOB, Stage.ROLLOUTS)) == total // 10
    assert await redis.xlen(keys.stream(JOB, Stage.ROLLOUTS)) == 0
    assert proxy.counts.replies_cut > 30


async def test_letters_are_put_back_and_samples_kept_once_through_lost_replies(redis: Redis, lossy: Redis) -> None:
    job_id = (await JobStore(redis).create(SPEC)).id
    for number in range(12):
        await add(redis, job_id, Stage.TASKS, f"train:{number}:1", b"task")
    reader = Consumer(redis, redis, job_id, Stage.TASKS, group="g", name="a", limit_bytes=MIN_ENTRY_BYTES)
    for entry in await reader.read(12, 0.5):
        await reader.dead_letter(entry, "spoiled")
    for letter in await dead_letters.read(lossy, job_id, Stage.TASKS):
        await dead_letters.requeue(lossy, job_id, Stage.TASKS, letter.id)
    assert (await stream.depths(redis, job_id))[Stage.TASKS] == 12
    assert await redis.hget(keys.dead_bytes(job_id), Stage.TASKS) == b"0"
    for number in range(12):
        await keep_sample(lossy, scored_group(number, [1.0, 0.0]))
    name = keys.samples(scored_group(0, [1.0, 0.0]).group.task.job_id)
    assert [json.loads(raw)["group_id"] for raw in await redis.lrange(name, 0, -1)] == list(reversed(range(12)))


async def test_a_worker_beats_and_leaves_through_lost_replies(redis: Redis, lossy: Redis) -> None:
    for _ in range(5):
        await write_heartbeat(lossy, WorkerStatus("rollout-a", WorkerKind.ROLLOUT, "idle"))
    assert [status.name for status in await live_workers(redis)] == ["rollout-a"]
    await remove_worker(lossy, "rollout-a")
    assert await live_workers(redis) == []


async def test_a_half_open_connection_is_given_up_at_its_deadline_and_the_command_has_its_effect(
    redis: Redis, proxy: CutProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy.faults.cut_reply = 0.0
    monkeypatch.setattr(connection, "COMMAND_TIMEOUT_S", 0.5)
    client = connect(f"redis://127.0.0.1:{proxy.port}/0")
    await client.ping()
    proxy.faults.frozen = True
    adding = asyncio.create_task(add(client, JOB, Stage.TASKS, "train:0:1", b"x"))
    await asyncio.sleep(0.7)
    proxy.break_all()
    proxy.faults.frozen = False
    await asyncio.wait_for(adding, 5)
    assert (await stream.depths(redis, JOB))[Stage.TASKS] == 1
    await client.aclose()


async def test_a_blocked_reader_of_a_half_open_connection_comes_back_in_time(
    redis: Redis, proxy: CutProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy.faults.cut_reply = 0.0
    monkeypatch.setattr(connection, "COMMAND_TIMEOUT_S", 0.5)
    blocking = connect(f"redis://127.0.0.1:{proxy.port}/0", block_s=0.2)
    reader = Consumer(redis, blocking, JOB, Stage.TASKS, group="g", name="a", limit_bytes=MIN_ENTRY_BYTES)
    assert await reader.read(1, 0.1) == []
    proxy.faults.frozen = True
    started = time.monotonic()
    assert await reader.read(1, 0.2) == []
    assert time.monotonic() - started < 2 * (0.5 + 0.2) + 2.0  # the other tests use this machine, too
    proxy.faults.frozen = False
    await add(redis, JOB, Stage.TASKS, "train:0:1", b"x")
    found = [entry.member for _ in range(5) for entry in await reader.read(1, 0.2)]
    assert found == ["train:0:1"]
    await blocking.aclose()


async def test_readers_and_writers_outlast_a_restart_of_redis(tmp_path: Path) -> None:
    server = OwnRedis(tmp_path / "redis")
    await asyncio.to_thread(server.start)
    client, blocking = connect(server.url), connect(server.url, block_s=1.0)
    reader = Consumer(client, blocking, JOB, Stage.TASKS, group="g", name="a", limit_bytes=MIN_ENTRY_BYTES)
    try:
        assert await reader.read(1, 0.1) == []
        await asyncio.to_thread(server.stop)
        adding = asyncio.create_task(add(client, JOB, Stage.TASKS, "train:0:1", b"x"))
        assert await reader.read(1, 0.5) == []
        assert not adding.done()
        assert redis_unavailable()
        await asyncio.to_thread(server.start)
        assert await asyncio.wait_for(adding, 20)
        assert not redis_unavailable()
        found = [entry.member for _ in range(10) for entry in await reader.read(1, 0.3)]
        assert found == ["train:0:1"]
    finally:
        await client.aclose()
        await blocking.aclose()
        await asyncio.to_thread(server.stop)


async def test_writers_and_readers_of_a_full_redis_wait_with_its_words_and_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = OwnRedis(tmp_path / "redis")
    await asyncio.to_thread(server.start)
    client, blocking = connect(server.url), connect(server.url, block_s=1.0)
    reader = Consumer(client, blocking, JOB, Stage.TASKS, group="g", name="a", limit_bytes=MIN_ENTRY_BYTES)
    try:
        await add(client, JOB, Stage.TASKS, "train:0:1", b"x")
        await reader.read(1, 0.1)
        await client.config_set("maxmemory", "1mb")
        adding = asyncio.create_task(add(client, JOB, Stage.TASKS, "train:1:1", b"y" * 100))
        beating = asyncio.create_task(write_heartbeat(client, WorkerStatus("a", WorkerKind.ROLLOUT, "idle")))
        await asyncio.sleep(0.5)
        assert not adding.done()
        assert not beating.done()
        assert "Redis refuses for now, and is waited for: OOM" in caplog.text
        await client.config_set("maxmemory", "0")
        await asyncio.wait_for(asyncio.gather(adding, beating), 10)
        assert (await stream.depths(client, JOB))[Stage.TASKS] == 2
    finally:
        await client.aclose()
        await blocking.aclose()
        await asyncio.to_thread(server.stop)


@pytest.mark.parametrize(
    ("error", "tries"),
    [
        (RedisConnectionError("gone"), 3),
        (RedisTimeoutError("late"), 3),
        (ResponseError("MISCONF Errors writing to the AOF file: No space left on device"), 3),
        (ResponseError("WRONGTYPE no"), 1),
        (AuthenticationError("no"), 1),
    ],
)
async def test_only_what_may_pass_is_tried_again(error: Exception, tries: int) -> None:
    count = 0

    async def do() -> str:
        nonlocal count
        count += 1
        if count < 3:
            raise error
        return "done"

    async def fail(_: Exception) -> None:
        pass

    if tries == 1:
        with pytest.raises(type(error)):
            await RetryPolicy().call_with_retry(do, fail)
    else:
        assert await RetryPolicy().call_with_retry(do, fail) == "done"
    assert count == tries


async def test_an_outage_longer_than_is_borne_ends_with_its_error() -> None:
    started = time.monotonic()

    async def do() -> None:
        raise RedisConnectionError("gone")

    async def fail(_: Exception) -> None:
        pass

    with pytest.raises(RedisConnectionError, match="gone"):
        await RetryPolicy(outage_s=0.3).call_with_retry(do, fail)
    assert 0.3 <= time.monotonic() - started < 3
