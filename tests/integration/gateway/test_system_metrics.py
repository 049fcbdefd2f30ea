"""What the gateway tells of the whole system is what Redis holds."""

from __future__ import annotations

from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from redis.asyncio import Redis

from services.common.jobs.record import ActiveJob, JobState
from services.common.jobs.store import JobStore
from services.common.redis import keys
from services.common.redis.keys import Stage
from services.common.service.heartbeat import WorkerKind, WorkerStatus, remove_worker, write_heartbeat
from services.common.spec.job import JobSpec
from services.common.streams import stream
from services.common.streams.consumer import Consumer
from services.common.streams.limits import MIN_ENTRY_BYTES
from services.gateway.system_metrics import JobCounts


async def scrape(client: httpx.AsyncClient) -> dict[tuple[str, ...], float]:
    """Every sample, by its name and its label values, which come in the order of the labels' names."""
    families = text_string_to_metric_families((await client.get("/metrics")).text)
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


async def activate(store: JobStore, job_id: str, version: int) -> None:
    await store.activate(ActiveJob(job_id, 1, "127.0.0.1:1", version, "/models/tiny"))


async def test_jobs_are_counted_by_state_as_they_change(
    client: httpx.AsyncClient, store: JobStore, document: dict[str, Any]
) -> None:
    spec = JobSpec.model_validate(document)
    first, second, _third = [(await store.create(spec)).id for _ in range(3)]

    async def counts() -> dict[str, float]:
        found = await scrape(client)
        return {state: found["millrace_gateway_jobs", state] for state in JobState}

    nothing = dict.fromkeys(JobState, 0.0)
    assert await counts() == nothing | {JobState.QUEUED: 3}
    await store.transition(first, JobState.RUNNING, allowed=[JobState.QUEUED])
    await store.transition(second, JobState.FAILED, allowed=[JobState.QUEUED])
    assert await counts() == nothing | {JobState.QUEUED: 1, JobState.RUNNING: 1, JobState.FAILED: 1}
    await store.transition(first, JobState.SUCCEEDED, allowed=[JobState.RUNNING])
    await store.create(spec)
    assert await counts() == nothing | {JobState.QUEUED: 2, JobState.SUCCEEDED: 1, JobState.FAILED: 1}
    assert await counts() == nothing | {JobState.QUEUED: 2, JobState.SUCCEEDED: 1, JobState.FAILED: 1}


async def test_an_ended_job_is_read_once(redis: Redis, store: JobStore, document: dict[str, Any]) -> None:
    job_counts = JobCounts()
    job_id = (await store.create(JobSpec.model_validate(document))).id
    await store.transition(job_id, JobState.FAILED, allowed=[JobState.QUEUED])
    assert (await job_counts.count(redis))[JobState.FAILED] == 1
    await redis.delete(keys.record(job_id))  # looked at again, it would be missed
    assert (await job_counts.count(redis))[JobState.FAILED] == 1


async def test_the_counts_begin_anew_when_redis_has_lost_its_data(
    redis: Redis, store: JobStore, document: dict[str, Any]
) -> None:
    job_counts, spec = JobCounts(), JobSpec.model_validate(document)
    for _ in range(3):
        await store.create(spec)
    assert (await job_counts.count(redis))[JobState.QUEUED] == 3
    await redis.flushall()
    await store.create(spec)
    assert (await job_counts.count(redis))[JobState.QUEUED] == 1


async def test_stream_depths_and_dead_letters_are_summed_over_active_jobs(
    client: httpx.AsyncClient, redis: Redis, store: JobStore
) -> None:
    for job_id, entries in (("a", 2), ("b", 3), ("retired", 7)):
        for number in range(entries):
            await stream.add(redis, job_id, Stage.TASKS, f"train:{number}:1", b"x")
    for job_id in ("a", "b"):
        await activate(store, job_id, 0)
    consumer = Consumer(redis, redis, "a", Stage.TASKS, group="g", name="n", limit_bytes=MIN_ENTRY_BYTES)
    (entry,) = await consumer.read(1, 0.1)
    await consumer.dead_letter(entry, "broken")
    found = await scrape(client)
    depths = {stage: found["millrace_gateway_stream_entries", stage] for stage in Stage}
    assert depths == {Stage.TASKS: 4, Stage.ROLLOUTS: 0, Stage.SCORED: 0}
    assert {stage: found["millrace_gateway_dead_letters", stage] for stage in Stage} == {
        Stage.TASKS: 1,
        Stage.ROLLOUTS: 0,
        Stage.SCORED: 0,
    }
    assert found["millrace_gateway_active_jobs",] == 2
    assert found["millrace_gateway_redis_memory_bytes",] > 100_000


async def test_a_server_is_as_far_behind_as_its_own_jobs_newest_version(
    client: httpx.AsyncClient, redis: Redis, store: JobStore
) -> None:
    await activate(store, "a", 9)
    await activate(store, "b", 2)
    for name, job_id, version in (("r0", "a", 9), ("r1", "a", 4), ("r2", "b", None), ("r3", None, None)):
        await write_heartbeat(
            redis, WorkerStatus(name, WorkerKind.ROLLOUT, "sampling", job_id=job_id, policy_version=version)
        )
    found = await scrape(client)
    lags = {key[1]: value for key, value in found.items() if key[0] == "millrace_gateway_worker_lag_versions"}
    assert lags == {"r0": 0, "r1": 5, "r2": 3}
    assert found["millrace_gateway_worker_info", "rollout", "sampling", "r3"] == 1


async def test_a_worker_that_left_is_not_told_of_any_more(client: httpx.AsyncClient, redis: Redis) -> None:
    await write_heartbeat(redis, WorkerStatus("r0", WorkerKind.ROLLOUT, "idle"))
    assert ("millrace_gateway_worker_info", "rollout", "idle", "r0") in await scrape(client)
    await write_heartbeat(redis, WorkerStatus("r0", WorkerKind.ROLLOUT, "sampling"))
    names = [key for key in await scrape(client) if key[0] == "millrace_gateway_worker_info"]
    assert names == [("millrace_gateway_worker_info", "rollout", "sampling", "r0")]
    await remove_worker(redis, "r0")
    assert not [key for key in await scrape(client) if key[0] == "millrace_gateway_worker_info"]


async def test_jobs_that_are_deleted_are_counted_no_more_and_the_others_are_not_read_again(
    redis: Redis, store: JobStore, document: dict[str, Any]
) -> None:
    job_counts, spec = JobCounts(), JobSpec.model_validate(document)
    ids = [(await store.create(spec)).id for _ in range(4)]
    for job_id in ids[:3]:
        await store.transition(job_id, JobState.FAILED, allowed=[JobState.QUEUED])
    assert (await job_counts.count(redis))[JobState.FAILED] == 3
    await redis.zrem(keys.JOBS, ids[0])
    await redis.delete(*(keys.record(job_id) for job_id in ids[:3]))  # looked at again, they would be missed
    counts = await job_counts.count(redis)
    assert (counts[JobState.FAILED], counts[JobState.QUEUED]) == (2, 1)
    await store.create(spec)
    assert (await job_counts.count(redis))[JobState.QUEUED] == 2
