"""A job that cannot make a step says so while it tries, and stops: a head on scripted ranks, with real Redis and files."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY
from redis.asyncio import Redis

from services.common.jobs import deaths
from services.common.jobs.deaths import Death
from services.common.jobs.fates import FATES_FILE, Fate, read_fates
from services.common.jobs.record import JobRecord, JobState
from services.common.spec.job import JobSpec
from services.common.streams.types import RolloutGroup, ScoredGroup, Task, Verdict, VerdictStatus
from services.learner.groups import buffer, data, failures
from tests.integration.learner.peers import answer, peers_of
from tests.integration.learner.scripted_ranks import ROWS, ScriptedLearner
from tests.integration.rollout.conftest import write_model
from tests.unit.learner.odd_sources import HANGS, RAISES

pytestmark = pytest.mark.parametrize("redis_url", ["embedded"], indirect=True, scope="session")
"""What differs between servers is tested elsewhere."""

BOOM = "2 of 2 checks failed: ValueError: boom"
TOO_LONG = "the prompt has 5000 tokens; the model takes 1024"


@pytest.fixture
async def learner(redis: Redis, redis_url: str, tmp_path: Path) -> AsyncIterator[ScriptedLearner]:
    write_model(tmp_path / "models" / "tiny")
    made = ScriptedLearner(tmp_path, redis_url, redis)
    yield made
    await made.stop()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of failures are judged within seconds."""
    monkeypatch.setattr(failures, "MIN_RUN_S", 2.0)
    monkeypatch.setattr(failures, "SPREAD_S", 2.0)


def job_spec(**sections: Any) -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": "hopeless",
            "model": {"path": "tiny"},
            "data": {"train": ROWS},
            "rollout": {"group_size": 2, "rollout_max_tokens": 8},
            "algorithm": {"filter_groups_train_batch_size": 2, "filter_groups_max_batches": 1},
            "learner": {"steps": 5},
            "checkpoint": {"interval_steps": 100, "export": False},
        }
        | sections
    )


def checks_fail(task: Task, version: int) -> ScoredGroup:
    scored = answer(task, version)
    return replace(
        scored, verdicts=(Verdict(VerdictStatus.FAILED, None, None, "v", "ValueError: boom"),) * task.group_size
    )


def too_long(task: Task, _: int) -> ScoredGroup:
    return ScoredGroup(RolloutGroup(task, "rollout-0", b"", (), 0.01, TOO_LONG, permanent=True), (), 0.01)


def degenerate(task: Task, version: int) -> ScoredGroup:
    scored = answer(task, version)
    return replace(scored, verdicts=(Verdict(VerdictStatus.SCORED, 1.0, 1.0, "v"),) * task.group_size)


def sums(record: JobRecord) -> int:
    return sum(record.groups[fate.value] for fate in Fate)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("reply", "reason"), [(checks_fail, BOOM), (too_long, TOO_LONG)], ids=["verifier", "prompts"])
async def test_a_job_whose_every_group_fails_says_why_before_its_first_step_and_ends_with_the_reason(
    learner: ScriptedLearner,
    redis: Redis,
    redis_url: str,
    reply: Callable[[Task, int], ScoredGroup],
    reason: str,
) -> None:
    job_id = await learner.submit(job_spec())
    async with peers_of(redis, redis_url, job_id, delay_s=0.001) as peers:
        peers.reply = reply
        await learner.start(job_id)
        live = await learner.until(job_id, lambda job: job.groups.get("failed", 0) > 0, timeout_s=20)
        assert (live.step, live.state.ended) == (0, False)
        assert live.failure == reason
        assert set(live.failed_reasons) == {reason}
        assert REGISTRY.get_sample_value("millrace_learner_groups", {"fate": "failed"})
        stalled = await learner.until(job_id, lambda job: job.state is JobState.STALLED, timeout_s=20)
        assert stalled.cause.endswith(f"groups failed in a row; the newest: {reason}")
        ended = await learner.ended(job_id, JobState.FAILED)
    assert ended.cause.startswith("no step is possible: ")
    assert ended.cause.endswith(f" groups failed in a row; the newest: {reason}")
    assert 64 <= ended.groups["failed"] < 300, "issuing slowed down"
    assert (sums(ended), ended.groups["active"]) == (ended.groups["issued"], 0)
    assert ended.failed_reasons == {reason: ended.groups["failed"]}
    told = read_fates(learner.folder(job_id) / FATES_FILE, fate=None, offset=0, limit=0)
    assert told.failed_reasons == {reason: ended.groups["failed"]}


@pytest.mark.usefixtures("quick")
async def test_a_job_whose_verifier_is_mended_goes_on_at_full_speed(
    learner: ScriptedLearner, redis: Redis, redis_url: str
) -> None:
    job_id = await learner.submit(job_spec())
    async with peers_of(redis, redis_url, job_id, delay_s=0.001) as peers:
        peers.reply = checks_fail
        await learner.start(job_id)
        await learner.until(job_id, lambda job: job.state is JobState.STALLED, timeout_s=20)
        peers.reply = None
        ended = await learner.ended(job_id)
    assert (ended.step, ended.cause) == (5, "")
    assert ended.failed_reasons == {BOOM: ended.groups["failed"]}


async def test_a_job_whose_every_group_is_degenerate_ends_within_the_bound_of_its_refills(
    learner: ScriptedLearner, redis: Redis, redis_url: str
) -> None:
    job_id = await learner.submit(job_spec())
    async with peers_of(redis, redis_url, job_id, delay_s=0.001) as peers:
        peers.reply = degenerate
        await learner.start(job_id)
        stalled = await learner.until(job_id, lambda job: job.state is JobState.STALLED, timeout_s=20)
        assert "none was informative" in stalled.cause
        ended = await learner.ended(job_id, JobState.FAILED)
    assert ended.cause.startswith("no step is possible: ")
    assert "none was informative" in ended.cause
    assert buffer.HOPELESS_GROUPS <= ended.groups["degenerate"] < 4 * buffer.HOPELESS_GROUPS


@pytest.mark.usefixtures("quick")
async def test_an_evaluation_that_only_fails_ends_and_says_so(
    learner: ScriptedLearner, redis: Redis, redis_url: str
) -> None:
    source = {"source": "reasoning_gym:chain_sum", "size": 500}
    spec = job_spec(
        data={"train": source, "eval": source | {"seed": 9}}, eval={"enabled": True, "tasks": 4, "samples": 2}
    )
    job_id = await learner.submit(spec)
    async with peers_of(redis, redis_url, job_id, delay_s=0.001) as peers:
        peers.reply = checks_fail
        await learner.start(job_id)
        ended = await learner.ended(job_id, JobState.FAILED)
        evals = await learner.evals(job_id)
    assert "ValueError: boom" in ended.cause
    assert evals[0]["failure"] == "none of 4 held-out tasks could be judged; the newest: ValueError: boom"
    assert (evals[0]["unanswered"], evals[0]["avg_at_k"]) == (4, None)


async def test_servers_that_cannot_start_the_engine_fail_the_job_with_their_own_last_line(
    learner: ScriptedLearner, redis: Redis
) -> None:
    job_id = await learner.submit(job_spec())
    await learner.start(job_id)
    await learner.until(job_id, lambda job: job.state is JobState.RUNNING, timeout_s=20)
    await asyncio.sleep(1)  # a look has been
    for number in range(2):
        cause = f"ValueError: head size 16 is not supported ({number})"
        await deaths.report(redis, job_id, Death("rollout-0", cause, time.time(), loading=True))
    ended = await learner.ended(job_id, JobState.FAILED)
    assert ended.cause == (
        "the engine does not start with this model: ValueError: head size 16 is not supported (1) (2 times in a row)"
    )


async def test_servers_that_die_again_and_again_never_fail_a_job_that_trains(
    learner: ScriptedLearner, redis: Redis, redis_url: str
) -> None:
    job_id = await learner.submit(job_spec(learner={"steps": 60}))
    async with peers_of(redis, redis_url, job_id, delay_s=0.02):
        await learner.start(job_id)
        number = 0
        while not (record := await learner.store.get(job_id)).state.ended:
            number += 1
            await deaths.report(redis, job_id, Death("rollout-1", f"killed {number}", time.time(), loading=True))
            await asyncio.sleep(0.05)
        assert record.state is JobState.SUCCEEDED, record.cause
    assert number > 20


async def test_weights_that_are_not_finite_are_refused_before_anything_is_sampled(
    learner: ScriptedLearner, tmp_path: Path
) -> None:
    job_id = await learner.submit(job_spec())
    await learner.start(job_id, finite=False)
    ended = await learner.ended(job_id, JobState.FAILED)
    model = tmp_path / "models" / "tiny"
    assert ended.cause == f"model.path: {model} has values that are not finite: broken"
    assert ended.groups.get("issued", 0) == 0
    assert job_id not in await learner.store.active()


async def test_a_task_that_raises_fails_its_group_and_one_that_never_comes_the_job(
    learner: ScriptedLearner, redis: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "SOURCES", "tests.unit.learner.odd_sources:OddSources")
    monkeypatch.setattr(data, "TASK_S", 1.0)
    source = {"train": {"source": "reasoning_gym:chain_sum"}, "shuffle": False}
    job_id = await learner.submit(job_spec(data=source, learner={"steps": 1000}))
    async with peers_of(redis, redis_url, job_id, delay_s=0.001):
        await learner.start(job_id)
        ended = await learner.ended(job_id, JobState.FAILED)
    assert ended.cause == f"no step is possible: data.train: task {HANGS} was not made within 1 s"
    assert ended.failed_reasons == {f"data.train: task {RAISES}: ZeroDivisionError: division by zero": 1}
    assert ended.step > 0, "the others were trained"
    assert (sums(ended), ended.groups["active"]) == (ended.groups["issued"], 0)


async def test_deaths_are_not_counted_while_the_job_is_paused(
    learner: ScriptedLearner, redis: Redis, redis_url: str
) -> None:
    job_id = await learner.submit(job_spec())
    async with peers_of(redis, redis_url, job_id, delay_s=0.001) as peers:
        peers.answering.clear()
        await learner.start(job_id)
        await learner.until(job_id, lambda job: job.state is JobState.RUNNING, timeout_s=20)
        await learner.store.pause(job_id)
        await learner.until(job_id, lambda job: job.state is JobState.PAUSED, timeout_s=20)
        for number in range(5):
            await deaths.report(redis, job_id, Death("rollout-0", f"killed {number}", time.time(), loading=True))
        await asyncio.sleep(1.5)
        await learner.store.resume(job_id)
        await learner.until(job_id, lambda job: job.state is JobState.RUNNING, timeout_s=20)
        await asyncio.sleep(1.5)
        peers.answering.set()
        await learner.ended(job_id)
