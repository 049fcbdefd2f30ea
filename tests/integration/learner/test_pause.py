"""Pausing a real learner: it stops between two steps, comes back paused after a crash, and loses or repeats nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from redis.asyncio import Redis

from services.common.jobs.record import PAUSED_CAUSE, JobState
from services.common.jobs.store import JobStore
from services.common.redis import keys
from services.common.service.heartbeat import live_workers
from services.common.spec.job import JobSpec
from tests.integration.learner.accounts import check_accounts
from tests.integration.learner.peers import Learner, peers_of, settled, until

pytestmark = pytest.mark.slow

STEPS = 10


@pytest.fixture
def spec() -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": "pausing",
            "model": {"path": "tiny"},
            "data": {"train": {"source": "reasoning_gym:chain_sum", "size": 100}},
            "rollout": {"group_size": 2, "rollout_max_tokens": 8},
            "algorithm": {"filter_groups_train_batch_size": 2},
            "learner": {"steps": STEPS},
            "checkpoint": {"interval_steps": 1000},
            "eval": {"enabled": False},
        }
    )


async def test_a_paused_job_holds_through_a_crash_and_loses_and_repeats_no_group(
    learner: Learner, redis: Redis, redis_url: str, spec: JobSpec, tmp_path: Path
) -> None:
    store = JobStore(redis)
    job_id = (await store.create(spec)).id
    learner.start()
    async with peers_of(redis, redis_url, job_id) as peers:
        await until(store, job_id, lambda job: job.step >= 3, learner)
        peers.answering.clear()  # groups are in flight when the pause begins
        await store.pause(job_id)
        paused = await until(store, job_id, lambda job: job.state is JobState.PAUSED, learner)
        assert paused.cause == PAUSED_CAUSE
        assert paused.policy_version == paused.step < STEPS
        assert (tmp_path / "jobs" / job_id / "checkpoints" / f"step-{paused.step:08d}" / "MANIFEST.json").is_file()
        asked = len(peers.asked)
        peers.answering.set()  # what was under way comes in, and waits

        async def work() -> int:
            return len(peers.asked) + int(await redis.xlen(keys.stream(job_id, keys.Stage.TASKS)))

        taken = await settled(work)
        assert taken == len(peers.asked) >= asked
        still = await store.get(job_id)
        assert (still.state, still.step, still.policy_version) == (JobState.PAUSED, paused.step, paused.step)
        address = (await store.active())[job_id].weights_address  # servers stay attached

        learner.kill()
        learner.start()

        async def at() -> str:
            return (await store.active())[job_id].weights_address

        async with asyncio.timeout(120):
            while await at() == address:
                await asyncio.sleep(0.1)
        await settled(work)
        back = await store.get(job_id)
        assert (back.state, back.cause, back.step) == (JobState.PAUSED, PAUSED_CAUSE, paused.step)
        assert len(peers.asked) == taken, "a task was issued during the pause"

        await store.resume(job_id)
        running = await until(store, job_id, lambda job: job.state is not JobState.PAUSED, learner)
        assert running.cause == ""
        ended = await until(store, job_id, lambda job: job.state.ended, learner)
    await check_accounts(redis, tmp_path, ended, STEPS)
    assert ended.policy_version == STEPS
    assert all(member.endswith(":1") for member in peers.asked), "a deadline ran out during the pause"


async def test_a_queued_job_is_held_and_a_paused_one_can_be_cancelled(
    learner: Learner, redis: Redis, redis_url: str, spec: JobSpec
) -> None:
    store = JobStore(redis)
    job_id = (await store.create(spec)).id
    assert (await store.pause(job_id)).state is JobState.PAUSED
    learner.start()
    async with asyncio.timeout(60):
        while not await live_workers(redis):
            await asyncio.sleep(0.1)
    await asyncio.sleep(2)  # it looks into the queue once a second
    held = await store.get(job_id)
    assert (held.state, held.learner) == (JobState.PAUSED, None)
    await store.resume(job_id)
    async with peers_of(redis, redis_url, job_id):
        await until(store, job_id, lambda job: job.step >= 1, learner)
        await store.pause(job_id)
        await until(store, job_id, lambda job: job.state is JobState.PAUSED, learner)
        await store.cancel(job_id)
        ended = await until(store, job_id, lambda job: job.state.ended, learner, timeout_s=30)
    assert (ended.state, ended.cause) == (JobState.CANCELLED, "cancelled on request")
    assert ended.groups["active"] == 0
    assert job_id not in await store.active()
