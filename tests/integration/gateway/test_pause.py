"""Pause and resume over HTTP, and the state machine behind them on a real Redis."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import redis.asyncio

from services.common.jobs.record import LIVE, PAUSED_CAUSE, JobState
from services.common.jobs.store import JobStore
from services.common.redis import keys

JobJson = dict[str, Any]


@pytest.fixture
async def path(client: httpx.AsyncClient, document: JobJson) -> str:
    """Of a queued job."""
    return str((await client.post("/jobs", json=document)).headers["location"])


def job_id_of(path: str) -> str:
    return path.rpartition("/")[2]


async def running(store: JobStore, path: str) -> str:
    """Lets a learner have the job and say that it runs."""
    record = await store.claim("learner-a")
    assert record is not None
    await store.transition(record.id, JobState.RUNNING, allowed=LIVE)
    assert record.id == job_id_of(path)
    return record.id


async def kinds(redis: redis.asyncio.Redis, path: str) -> list[str]:
    events: Any = await redis.xrange(keys.events(job_id_of(path)))
    return [fields[b"kind"].decode() for _, fields in events]


async def test_a_paused_queued_job_is_claimed_by_nobody_and_keeps_its_place(
    client: httpx.AsyncClient, store: JobStore, document: JobJson, path: str
) -> None:
    job = (await client.post(f"{path}/pause")).json()
    assert (job["state"], job["cause"], job["pause_requested"]) == ("paused", PAUSED_CAUSE, True)
    later = (await client.post("/jobs", json=document)).headers["location"]
    claimed = await store.claim("learner-a")
    assert claimed is not None
    assert claimed.id == job_id_of(later)
    assert await store.claim("learner-b") is None
    job = (await client.post(f"{path}/resume")).json()
    assert (job["state"], job["cause"], job["pause_requested"]) == ("queued", "", False)
    claimed = await store.claim("learner-b")
    assert claimed is not None
    assert claimed.id == job_id_of(path)


async def test_the_place_in_the_queue_survives_many_looks_at_it(
    client: httpx.AsyncClient, store: JobStore, document: JobJson, path: str
) -> None:
    await client.post(f"{path}/pause")
    for _ in range(3):
        assert await store.claim("learner-a") is None
    await client.post("/jobs", json=document)
    await client.post(f"{path}/resume")
    claimed = await store.claim("learner-a")
    assert claimed is not None
    assert claimed.id == job_id_of(path)


async def test_a_running_jobs_learner_is_asked_to_pause_and_to_go_on(
    client: httpx.AsyncClient, store: JobStore, redis: redis.asyncio.Redis, path: str
) -> None:
    await running(store, path)
    job = (await client.post(f"{path}/pause")).json()
    assert (job["state"], job["pause_requested"]) == ("running", True)
    await store.transition(job["id"], JobState.PAUSED, allowed=LIVE, cause=PAUSED_CAUSE)
    job = (await client.post(f"{path}/resume")).json()
    assert (job["state"], job["pause_requested"], job["learner"]) == ("paused", False, "learner-a")
    assert await kinds(redis, path) == ["state", "state", "state", "pause", "state", "resume"]


async def test_a_pause_can_be_taken_back_before_it_took_effect(
    client: httpx.AsyncClient, store: JobStore, path: str
) -> None:
    await running(store, path)
    await client.post(f"{path}/pause")
    job = (await client.post(f"{path}/resume")).json()
    assert (job["state"], job["pause_requested"]) == ("running", False)


async def test_pausing_twice_is_pausing_once(client: httpx.AsyncClient, store: JobStore, path: str) -> None:
    first, second = await client.post(f"{path}/pause"), await client.post(f"{path}/pause")
    assert (first.status_code, first.json()) == (second.status_code, second.json())
    await client.post(f"{path}/resume")
    await running(store, path)
    assert (await client.post(f"{path}/pause")).json() == (await client.post(f"{path}/pause")).json()


@pytest.mark.parametrize("claimed", [False, True])
async def test_what_is_not_paused_cannot_be_resumed(
    client: httpx.AsyncClient, store: JobStore, path: str, claimed: bool
) -> None:
    if claimed:
        await running(store, path)
    answer = await client.post(f"{path}/resume")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "conflict")
    assert "only a paused job can be resumed" in answer.json()["error"]["message"]


@pytest.mark.parametrize("verb", ["pause", "resume"])
async def test_an_ended_job_is_neither_paused_nor_resumed(client: httpx.AsyncClient, path: str, verb: str) -> None:
    await client.post(f"{path}/pause")
    assert (await client.post(f"{path}/cancel")).json()["state"] == "cancelled"
    answer = await client.post(f"{path}/{verb}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "conflict")
    assert (await client.get(path)).json()["state"] == "cancelled"


@pytest.mark.parametrize("verb", ["pause", "resume"])
async def test_an_unknown_job_is_a_404(client: httpx.AsyncClient, verb: str) -> None:
    assert (await client.post(f"/jobs/demo-00000000/{verb}")).status_code == 404


async def test_a_job_held_in_the_queue_is_cancelled_at_once_and_leaves_it(
    client: httpx.AsyncClient, store: JobStore, redis: redis.asyncio.Redis, path: str
) -> None:
    await client.post(f"{path}/pause")
    job = (await client.post(f"{path}/cancel")).json()
    assert (job["state"], job["finished_at"] >= job["created_at"]) == ("cancelled", True)
    assert await store.claim("learner-a") is None
    assert await redis.zcard(keys.QUEUE) == 0


async def test_a_job_that_its_learner_paused_is_cancelled_by_the_learner(
    client: httpx.AsyncClient, store: JobStore, path: str
) -> None:
    job_id = await running(store, path)
    await store.transition(job_id, JobState.PAUSED, allowed=LIVE, cause=PAUSED_CAUSE)
    job = (await client.post(f"{path}/cancel")).json()
    assert (job["state"], job["cancel_requested"]) == ("paused", True)


async def test_a_restarted_learner_is_given_its_paused_job_again(store: JobStore, path: str) -> None:
    job_id = await running(store, path)
    await store.transition(job_id, JobState.PAUSED, allowed=LIVE, cause=PAUSED_CAUSE)
    assert await store.claim("learner-b") is None
    again = await store.claim("learner-a")
    assert again is not None
    assert (again.id, again.state) == (job_id, JobState.PAUSED)
