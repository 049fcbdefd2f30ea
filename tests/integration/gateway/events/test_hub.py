"""However many read a job's events, Redis is looked at once; a reader that is slow delays itself only."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio

from services.common.jobs.record import JobRecord, JobState
from services.common.jobs.store import JobStore
from services.common.redis import keys
from services.common.spec.job import JobSpec
from services.gateway.events.hub import BEGINNING, FEED_SIZE, PAGE_SIZE, EventHub
from services.gateway.events.stream import follow
from services.gateway.middleware.streams import StreamLimit

POLL_S = 0.05


@pytest.fixture
def hub(redis: redis.asyncio.Redis) -> EventHub:
    return EventHub(redis, POLL_S)


@pytest.fixture
async def job(store: JobStore, document: dict[str, Any]) -> JobRecord:
    return await store.create(JobSpec.model_validate(document))


def read(hub: EventHub, job: JobRecord, place: tuple[int, int] = BEGINNING) -> AsyncIterator[bytes]:
    permit = StreamLimit(1).acquire("a")
    assert permit is not None
    return follow(hub, job, place, permit)


def steps_in(events: list[bytes]) -> list[int]:
    data = [json.loads(event.split(b"data: ")[1]) for event in events if b"event: step" in event]
    return [item["step"] for item in data]


async def tell(redis: redis.asyncio.Redis, job: JobRecord, first: int, last: int) -> None:
    async with redis.pipeline(transaction=False) as pipe:
        for step in range(first, last + 1):
            pipe.xadd(keys.events(job.id), {"kind": "step", "at": 1.0, "d": json.dumps({"step": step})})
        await pipe.execute()


async def end(store: JobStore, job: JobRecord) -> None:
    await store.transition(job.id, JobState.SUCCEEDED, allowed=list(JobState))


async def calls(redis: redis.asyncio.Redis, command: str) -> int:
    stats: Any = await redis.info("commandstats")
    return int(stats.get(f"cmdstat_{command}", {"calls": 0})["calls"])


async def test_fifty_readers_of_a_job_cost_redis_one_look_at_a_time_and_all_get_everything(
    hub: EventHub, redis: redis.asyncio.Redis, store: JobStore, job: JobRecord
) -> None:
    readers = [asyncio.create_task(collect(read(hub, job))) for _ in range(50)]
    await asyncio.sleep(0.3)
    before = await calls(redis, "xrange")
    for step in range(1, 11):
        await tell(redis, job, step, step)
        await asyncio.sleep(POLL_S)
    looks = await calls(redis, "xrange") - before
    await end(store, job)
    assert [steps_in(events) for events in await asyncio.gather(*readers)] == [list(range(1, 11))] * 50
    assert 1 <= looks <= 100, f"{looks} reads of ten steps: each of the fifty readers reads for itself"
    assert not hub._feeds


async def collect(events: AsyncIterator[bytes], pause_s: float = 0.0) -> list[bytes]:
    found = []
    async for event in events:
        found.append(event)
        if pause_s:
            await asyncio.sleep(pause_s)
    return found


async def test_a_reader_that_stands_still_delays_nobody_and_finds_all_it_missed_when_it_goes_on(
    hub: EventHub, redis: redis.asyncio.Redis, store: JobStore, job: JobRecord
) -> None:
    slow, quick = read(hub, job), asyncio.create_task(collect(read(hub, job)))
    missed = [await anext(slow)]
    last = FEED_SIZE + 3 * PAGE_SIZE
    await tell(redis, job, 1, last)
    await end(store, job)
    assert steps_in(await asyncio.wait_for(quick, 20)) == list(range(1, last + 1))
    kept = sum(len(feed._events) for feed in hub._feeds.values())
    assert kept <= FEED_SIZE
    assert steps_in(missed + await collect(slow)) == list(range(1, last + 1))


async def test_readers_that_begin_at_any_place_get_each_later_event_once_while_more_come(
    hub: EventHub, redis: redis.asyncio.Redis, store: JobStore, job: JobRecord
) -> None:
    await tell(redis, job, 1, 450)
    entries: Any = await redis.xrange(keys.events(job.id))
    ids = [entry for entry, _ in entries]  # the first is the job's own beginning
    places = {number: tuple(map(int, ids[number].decode().split("-"))) for number in (0, 1, 199, 200, 201, 449, 450)}
    readers = {
        number: asyncio.create_task(collect(read(hub, job, (place[0], place[1])))) for number, place in places.items()
    }
    for first in range(451, 951, 50):
        await tell(redis, job, first, first + 49)
        await asyncio.sleep(POLL_S / 2)
    await end(store, job)
    for number, task in readers.items():
        assert steps_in(await asyncio.wait_for(task, 20)) == list(range(number + 1, 951))


async def test_readers_of_many_jobs_are_each_told_of_their_own(
    hub: EventHub, redis: redis.asyncio.Redis, store: JobStore, document: dict[str, Any]
) -> None:
    jobs = [await store.create(JobSpec.model_validate(document)) for _ in range(120)]  # more than one pipeline takes
    readers = [asyncio.create_task(collect(read(hub, job))) for job in jobs]
    await asyncio.sleep(2 * POLL_S)
    for number, job in enumerate(jobs):
        await tell(redis, job, number, number)
        await end(store, job)
    assert [steps_in(events) for events in await asyncio.gather(*readers)] == [[number] for number in range(120)]


async def test_a_job_whose_events_cannot_be_read_ends_its_own_readers_only(
    hub: EventHub, redis: redis.asyncio.Redis, store: JobStore, job: JobRecord, document: dict[str, Any]
) -> None:
    broken = await store.create(JobSpec.model_validate(document))
    sound, lost = asyncio.create_task(collect(read(hub, job))), asyncio.create_task(collect(read(hub, broken)))
    await asyncio.sleep(2 * POLL_S)
    await redis.delete(keys.events(broken.id))
    await redis.set(keys.events(broken.id), "no stream")
    assert b"event: end" not in b"".join(await asyncio.wait_for(lost, 5))
    await tell(redis, job, 1, 1)
    await end(store, job)
    assert steps_in(await asyncio.wait_for(sound, 5)) == [1]


async def test_the_hub_rests_while_nobody_reads_and_begins_again(
    hub: EventHub, redis: redis.asyncio.Redis, store: JobStore, job: JobRecord
) -> None:
    reader = asyncio.create_task(collect(read(hub, job)))
    await asyncio.sleep(2 * POLL_S)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    await asyncio.sleep(3 * POLL_S)
    before = await calls(redis, "xrange")
    await asyncio.sleep(5 * POLL_S)
    assert await calls(redis, "xrange") == before
    again = asyncio.create_task(collect(read(hub, job)))
    await asyncio.sleep(2 * POLL_S)
    await end(store, job)
    assert b"event: end" in (await asyncio.wait_for(again, 5))[-1]


async def test_a_stream_that_lost_its_permit_ends_without_the_jobs_end(hub: EventHub, job: JobRecord) -> None:
    limit = StreamLimit(2)
    first, second = limit.acquire("a"), limit.acquire("a")
    assert first is not None
    assert second is not None
    reader = asyncio.create_task(collect(follow(hub, job, BEGINNING, first)))
    await asyncio.sleep(2 * POLL_S)
    assert limit.acquire("b") is not None
    assert b"event: end" not in b"".join(await asyncio.wait_for(reader, 5))
