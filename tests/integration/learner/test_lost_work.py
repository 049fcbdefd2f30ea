"""A head on scripted ranks, with real Redis and files: Redis is emptied again and again, or a newer head takes the job."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest
import torch
from redis.asyncio import Redis

from services.common.checkpoints.manifest import WrittenFile, digest_of_file
from services.common.config.settings import Settings
from services.common.errors import Fenced
from services.common.jobs.record import JobRecord, JobState
from services.common.jobs.restore import Restorer
from services.common.jobs.store import JobStore
from services.common.spec.job import JobSpec
from services.learner.controller import Head
from services.learner.groups.sequence import Sequence
from services.learner.ranks.client import Ranks
from services.learner.training.stats import StepStats
from services.learner.training.tensor_file import Weights, write_version
from tests.integration.learner.accounts import check_accounts
from tests.integration.learner.peers import peers_of
from tests.integration.rollout.conftest import write_model

STEPS = 40


class ScriptedRanks(Ranks):
    """Ranks whose one weight counts the groups that it was trained with; a step takes a few milliseconds."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0
        self.steps = 0
        self.finished = False
        self.written: list[WrittenFile] = []

    async def train(self, _: int, sequences: list[Sequence]) -> StepStats:
        await asyncio.sleep(0.02)
        self.total += float(sum(sequence.group_id for sequence in sequences))
        self.steps += 1
        return StepStats(self.steps, 0.1, 0.1, 1e-6, 1, len(sequences), 1, 0.0)

    async def finite(self) -> bool:
        return True

    async def weights(self) -> Weights:
        return {"weight": torch.tensor([self.total])}

    async def write_weights(self, path: Path, lineage: int, n: int) -> None:
        write_version(path, lineage, n, await self.weights())

    async def save(self, path: Path, **_: bool) -> None:
        file = path / "weight.json"
        file.write_text(json.dumps([self.total, self.steps]))
        self.written = [WrittenFile(file.name, file.stat().st_size, digest_of_file(file))]

    async def saved(self) -> list[WrittenFile]:
        return self.written

    async def load(self, path: Path, **_: bool) -> None:
        self.total, self.steps = json.loads((path / "weight.json").read_text())

    async def finish(self) -> None:
        self.finished = True

    @property
    def fault(self) -> BaseException | None:
        return self._fault


@pytest.fixture
def spec() -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": "lost-work",
            "model": {"path": "tiny"},
            "data": {"train": {"source": "reasoning_gym:chain_sum", "size": 1000}},
            "rollout": {"group_size": 2, "rollout_max_tokens": 8},
            "algorithm": {"filter_groups_train_batch_size": 4},
            "learner": {"steps": STEPS},
            "checkpoint": {"interval_steps": 7, "export": False},
            "eval": {"enabled": False},
        }
    )


@pytest.fixture
async def job_id(redis: Redis, spec: JobSpec, tmp_path: Path) -> str:
    write_model(tmp_path / "models" / "tiny")
    store = JobStore(redis, tmp_path / "jobs")
    made = (await store.create(spec)).id
    assert await store.claim("learner") is not None
    return made


def head(redis_url: str, home: Path, job_id: str, spec: JobSpec) -> tuple[Head, ScriptedRanks]:
    ranks = ScriptedRanks()
    settings = Settings.model_validate({"home": home, "REDIS_URL": redis_url})
    return Head(job_id, spec, home / "models" / "tiny", settings, ranks), ranks


async def until_ended(redis: Redis, home: Path, job_id: str, ranks: ScriptedRanks) -> JobRecord:
    """The record of the ended job; once no head is there to do it, the gateway's part puts it back."""
    store, gateway = JobStore(redis), Restorer(redis, home / "jobs", "gateway", lambda _: True)
    async with asyncio.timeout(120):
        while True:
            if ranks.finished:
                await gateway.restore_lost()
            record = await store.find(job_id)
            if record is not None and record.state.ended:
                return record
            assert ranks.fault is None, ranks.fault
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
async def test_a_redis_emptied_again_and_again_costs_no_group_and_no_step(
    redis: Redis, redis_url: str, job_id: str, spec: JobSpec, tmp_path: Path, seed: int
) -> None:
    dice = random.Random(seed)
    runner, ranks = head(redis_url, tmp_path, job_id, spec)
    async with peers_of(redis, redis_url, job_id) as peers:
        peers.delay_s = 0.005
        runner.start()
        ending = asyncio.create_task(until_ended(redis, tmp_path, job_id, ranks))
        for step in sorted(dice.sample(range(STEPS), 8)):
            while ranks.steps < step and not ending.done():
                await asyncio.sleep(0.005)
            await asyncio.sleep(dice.uniform(0.0, 0.05))
            await redis.flushall()
        ended = await ending
    await asyncio.to_thread(runner.join, 10.0)
    await Restorer(
        redis, tmp_path / "jobs", "gateway", lambda _: True
    ).restore_lost()  # the last time may have been after its end
    await check_accounts(redis, tmp_path, ended, STEPS)
    assert ended.incarnation == 1, "the same head went on"
    assert ranks.finished


async def test_a_head_whose_job_a_newer_one_took_ends_and_writes_nothing_more(
    redis: Redis, redis_url: str, job_id: str, spec: JobSpec, tmp_path: Path
) -> None:
    store = JobStore(redis)
    old, old_ranks = head(redis_url, tmp_path, job_id, spec)
    async with peers_of(redis, redis_url, job_id) as peers:
        peers.answering.clear()  # the old one waits for groups when the new one begins
        old.start()
        async with asyncio.timeout(30):
            while (await store.get(job_id)).state is not JobState.RUNNING:
                await asyncio.sleep(0.05)
        new, ranks = head(redis_url, tmp_path, job_id, spec)
        new.start()
        async with asyncio.timeout(10):
            while old_ranks.fault is None:
                await asyncio.sleep(0.05)
        assert isinstance(old_ranks.fault, Fenced)
        assert old_ranks.steps == 0
        peers.answering.set()
        await asyncio.sleep(1)
        assert ranks.steps == 0, "the old one's process still holds the folder"
        old.release()
        ended = await until_ended(redis, tmp_path, job_id, ranks)
    await asyncio.to_thread(new.join, 10.0)
    await check_accounts(redis, tmp_path, ended, STEPS)
    assert ended.incarnation == 2
