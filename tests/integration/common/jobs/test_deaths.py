from __future__ import annotations

import asyncio
import time

import pytest
from redis.asyncio import Redis

from services.common.jobs import deaths as job_deaths
from services.common.jobs.deaths import KILLED, MOST_DEATHS, Death, deaths, report, report_killed, served, serving
from services.common.redis import keys


def death(number: int = 0, *, worker: str = "rollout-0", loading: bool = False) -> Death:
    return Death(worker, f"cause {number}", 1000.0 + number, loading)


async def test_a_job_that_was_let_go_in_good_order_has_no_death(redis: Redis) -> None:
    await serving(redis, "demo-1", "rollout-0", loading=True)
    await serving(redis, "demo-1", "rollout-0", loading=False)
    await served(redis, "demo-1", "rollout-0")
    await report_killed(redis, "rollout-0")
    assert await deaths(redis, "demo-1") == []


async def test_a_reported_death_is_counted_once_however_often_it_is_sent_and_not_reported_again(redis: Redis) -> None:
    await serving(redis, "demo-1", "rollout-0", loading=True)
    for _ in range(3):
        await report(redis, "demo-1", death(loading=True))
    await report_killed(redis, "rollout-0")
    assert await deaths(redis, "demo-1") == [death(loading=True)]


@pytest.mark.parametrize("loading", [True, False])
async def test_a_mark_that_an_earlier_process_left_is_a_death_and_one_only(redis: Redis, loading: bool) -> None:
    await serving(redis, "demo-1", "rollout-0", loading=loading)
    await serving(redis, "demo-1", "rollout-1", loading=False)
    before = time.time()
    await report_killed(redis, "rollout-0")
    await report_killed(redis, "rollout-0")
    (found,) = await deaths(redis, "demo-1")
    assert (found.worker, found.cause, found.loading) == ("rollout-0", KILLED, loading)
    assert before <= found.at <= time.time()


async def test_the_end_of_a_whole_stack_is_no_death_of_a_job(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    await serving(redis, "demo-1", "rollout-0", loading=True)
    monkeypatch.setattr("os.getppid", lambda: 1)  # the next process has another parent
    await report_killed(redis, "rollout-0")
    assert await deaths(redis, "demo-1") == []
    assert await redis.hgetall(keys.serving("rollout-0")) == {}


async def test_the_newest_deaths_are_kept_oldest_first_for_a_time(redis: Redis) -> None:
    for number in range(MOST_DEATHS + 3):
        await report(redis, "demo-1", death(number))
    assert await deaths(redis, "demo-1") == [death(number) for number in range(3, MOST_DEATHS + 3)]
    assert 0 < await redis.ttl(keys.deaths("demo-1")) <= job_deaths.KEPT_S


async def test_deaths_of_several_workers_at_once_are_all_counted(redis: Redis) -> None:
    await asyncio.gather(*(report(redis, "demo-1", death(worker=f"rollout-{number}")) for number in range(8)))
    assert {found.worker for found in await deaths(redis, "demo-1")} == {f"rollout-{number}" for number in range(8)}


async def test_a_cause_of_many_lines_becomes_one_that_is_bounded(redis: Redis) -> None:
    await report(redis, "demo-1", Death("rollout-0", "a\nb\n" + "x" * 5000, 1.0, loading=False))
    (found,) = await deaths(redis, "demo-1")
    assert found.cause.startswith("a b x")
    assert len(found.cause) == job_deaths.CAUSE_CHARS


@pytest.mark.parametrize("broken", [b"", b"{", b"[]", b'{"worker": 1}'])
async def test_what_cannot_be_read_hides_no_other_death_and_stops_no_start(redis: Redis, broken: bytes) -> None:
    await redis.rpush(keys.deaths("demo-1"), broken)
    await report(redis, "demo-1", death())
    await redis.hset(keys.serving("rollout-0"), "demo-1", broken)
    await report_killed(redis, "rollout-0")
    assert await deaths(redis, "demo-1") == [death()]
