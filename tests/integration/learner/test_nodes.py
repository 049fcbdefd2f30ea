"""Two learner nodes on one machine: real agents, real torchelastic, ranks that meet over gloo."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from redis.asyncio import Redis

from services.cli.stack.children import free_port
from services.common.config.settings import Settings
from services.common.jobs.record import JobState
from services.common.jobs.store import JobStore
from services.common.service.lifecycle import Drain
from services.common.spec.job import JobSpec
from services.learner.agent.agent import Agent
from services.learner.ranks import launch
from services.learner.ranks.launch import Nodes
from tests.unit.common.models.test_directory import make_model

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("redis_url", ["embedded"], indirect=True)]

JOB = {
    "name": "spread",
    "model": {"path": "tiny"},
    "data": {"train": {"source": "reasoning_gym:chain_sum"}},
    "rollout": {"rollout_max_tokens": 32},
    "learner": {"data_parallel_size": 2},
}


def agent(home: Path, redis: Redis, drain: Drain, **settings: object) -> Agent:
    ours = Settings(home=home, worker="learner-a", learner_nodes=2, advertise_host="127.0.0.1", **settings)  # type: ignore[arg-type]
    return Agent(ours, redis, drain, home / "metrics" / Nodes.of(ours).own_name("learner-a"), 0)


async def until_ended(store: JobStore, job_id: str) -> JobState:
    while not (await store.get(job_id)).state.ended:
        await asyncio.sleep(0.1)
    return (await store.get(job_id)).state


async def test_ranks_on_two_nodes_meet_and_meet_again_after_one_died(
    redis: Redis, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "RANK_MODULE", "tests.integration.learner.node_rank")
    monkeypatch.setenv("REDIS_URL", redis_url)
    make_model(tmp_path / "models" / "tiny")
    drain, meeting = Drain(), f"127.0.0.1:{free_port()}"
    agents = [agent(tmp_path, redis, drain, learner_node=i, learner_rendezvous=meeting) for i in (0, 1)]
    loops = [asyncio.create_task(each.work_loop()) for each in agents]
    store = JobStore(redis)
    job = await store.create(JobSpec.model_validate(JOB))
    assert await asyncio.wait_for(until_ended(store, job.id), 200) is JobState.SUCCEEDED
    drain.request()
    await asyncio.wait_for(asyncio.gather(*loops), 60)

    seen = [json.loads(path.read_text()) for path in sorted((tmp_path / "seen").glob("rank-*.json"))]
    assert (tmp_path / "seen" / "died").exists()
    assert [(said["world"], said["sum"], said["local_rank"]) for said in seen] == [(2, 3.0, "0")] * 2
    assert {Path(said["metrics_dir"]).name for said in seen} == {"learner-a", "learner-a-node1"}


async def test_ranks_that_cannot_be_spread_fail_the_job_with_the_reason(redis: Redis, tmp_path: Path) -> None:
    make_model(tmp_path / "models" / "tiny")
    drain = Drain()
    leader = agent(tmp_path, redis, drain, learner_rendezvous="127.0.0.1:1")
    loop = asyncio.create_task(leader.work_loop())
    store = JobStore(redis)
    job = await store.create(JobSpec.model_validate(JOB | {"learner": {"data_parallel_size": 3}}))
    assert await asyncio.wait_for(until_ended(store, job.id), 60) is JobState.FAILED
    assert "3 ranks cannot be spread evenly over the learner's 2 nodes" in (await store.get(job.id)).cause
    drain.request()
    await loop
