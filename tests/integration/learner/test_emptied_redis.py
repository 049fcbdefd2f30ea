"""A real learner whose Redis is emptied under it: the job goes on, nothing is lost or trained twice, and a restart finds it again."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path

import pytest
from redis.asyncio import Redis

from services.common.jobs.folder import SPEC_FILE
from services.common.jobs.record import JobRecord, JobState
from services.common.jobs.store import JobStore
from services.common.redis import keys
from services.common.spec.job import JobSpec
from services.learner.audit.files import audit_job
from tests.integration.learner.accounts import check_accounts
from tests.integration.learner.peers import Learner, peers_of, until
from tests.unit.learner.old_folder import as_before_turns

pytestmark = pytest.mark.slow

STEPS = 12


@pytest.fixture
def spec() -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": "emptied",
            "model": {"path": "tiny"},
            "data": {
                "train": {"source": "reasoning_gym:chain_sum", "size": 100},
                "eval": {"source": "reasoning_gym:chain_sum", "size": 20, "seed": 9},
            },
            "rollout": {"group_size": 2, "rollout_max_tokens": 8},
            "algorithm": {"filter_groups_train_batch_size": 2},
            "learner": {"steps": STEPS},
            "checkpoint": {"interval_steps": 5},
            "eval": {"enabled": True, "tasks": 4, "samples": 2},
        }
    )


def reached(step: int, job: JobRecord) -> bool:
    """Whether the job runs and has come so far."""
    return job.state is JobState.RUNNING and job.step >= step


async def test_a_redis_emptied_during_a_job_costs_no_group(
    learner: Learner, redis: Redis, redis_url: str, spec: JobSpec, tmp_path: Path
) -> None:
    store = JobStore(redis, tmp_path / "jobs")
    job_id = (await store.create(spec)).id
    learner.start()
    async with peers_of(redis, redis_url, job_id) as peers:
        for step in (0, 2, 5, 9):
            await until(store, job_id, partial(reached, step), learner)
            peers.answering.clear()  # so that work is in every stream
            await asyncio.sleep(0.2)
            await redis.flushall()
            peers.answering.set()
        ended = await until(store, job_id, lambda job: job.state.ended, learner)
    await check_accounts(redis, tmp_path, ended, STEPS)
    assert [json.loads(raw)["step"] for raw in await redis.lrange(keys.evals(ended.id), 0, -1)] == [0, STEPS]
    assert ended.incarnation == 1, "the head had to be started again"
    assert "failed" not in learner.log.read_text()


async def test_a_learner_that_comes_back_to_an_emptied_redis_takes_its_job_up(
    learner: Learner, redis: Redis, redis_url: str, spec: JobSpec, tmp_path: Path
) -> None:
    store = JobStore(redis, tmp_path / "jobs")
    job_id = (await store.create(spec)).id
    async with peers_of(redis, redis_url, job_id) as peers:
        peers.last_version = 7  # so that the job cannot end before
        learner.start()
        await until(store, job_id, lambda job: job.step >= 7, learner)
        learner.kill()
        await redis.flushall()
        learner.start()
        peers.last_version = None
        ended = await until(store, job_id, lambda job: job.state.ended, learner)
    await check_accounts(redis, tmp_path, ended, STEPS)
    assert [json.loads(raw)["step"] for raw in await redis.lrange(keys.evals(ended.id), 0, -1)] == [0, STEPS]
    assert ended.incarnation == 2


async def test_a_job_that_a_release_without_turns_began_is_taken_up_and_ends(
    learner: Learner, redis: Redis, redis_url: str, spec: JobSpec, tmp_path: Path
) -> None:
    store, folders = JobStore(redis, tmp_path / "jobs"), tmp_path / "jobs"
    job_id = (await store.create(spec)).id
    async with peers_of(redis, redis_url, job_id) as peers:
        peers.last_version = 7
        learner.start()
        await until(store, job_id, lambda job: job.step >= 7, learner)
        learner.kill()
        await redis.flushall()
        as_before_turns(folders / job_id)
        learner.start()
        peers.last_version = None
        ended = await until(store, job_id, lambda job: job.state.ended, learner)
    await check_accounts(redis, tmp_path, ended, STEPS)
    assert "turn_credit" not in (folders / job_id / SPEC_FILE).read_text()
    report = await asyncio.to_thread(audit_job, folders / job_id, reported_state="succeeded")
    assert report.violations == []
