"""A job that starts: what it waits for is said, it can be cancelled, and ranks that die end it with their own words."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from safetensors.torch import load_file, save_file

from services.common.config.settings import Settings
from services.common.jobs import deaths as job_deaths
from services.common.jobs.record import JobRecord, JobState
from services.common.jobs.retention import Retention
from services.common.jobs.store import JobStore
from services.common.redis import keys
from services.common.service.lifecycle import Drain
from services.common.spec.job import JobSpec
from services.learner.agent import starts as named_wait
from services.learner.agent.agent import MAX_LOAD_FAILURES, MAX_RESTARTS, Agent
from services.learner.agent.starts import MAX_STARTS, STARTS_FILE
from services.learner.groups import data
from services.learner.ranks import launch
from tests.integration.rollout.conftest import write_model

pytestmark = pytest.mark.parametrize("redis_url", ["embedded"], indirect=True, scope="session")
"""What differs between servers is tested elsewhere."""

HUGE = 9223372036854775783
HANGS = {
    "source": "reasoning_gym:prime_factorization", "config": {"min_value": HUGE, "max_value": HUGE}, "size": 9
}  # fmt: skip


def job_spec(**sections: Any) -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": "starting",
            "model": {"path": "tiny"},
            "data": {"train": {"source": "reasoning_gym:chain_sum", "size": 500}},
            "rollout": {"group_size": 2, "rollout_max_tokens": 8},
        }
        | sections
    )


@pytest.fixture
def store(redis: Redis, tmp_path: Path) -> JobStore:
    write_model(tmp_path / "models" / "tiny")
    return JobStore(redis, tmp_path / "jobs")


@asynccontextmanager
async def agent(redis: Redis, redis_url: str, home: Path) -> AsyncIterator[Agent]:
    """A learner's agent at work."""
    settings, drain = Settings(home=home, redis_url=redis_url, worker="learner", drain_timeout_s=5.0), Drain()
    made = Agent(settings, redis, drain, home / "metrics", 0)
    task = asyncio.create_task(made.work_loop())
    try:
        yield made
    finally:
        drain.request()
        await task


async def until(
    store: JobStore, job_id: str, condition: Callable[[JobRecord], bool], timeout_s: float = 60
) -> JobRecord:
    record = await store.get(job_id)
    try:
        async with asyncio.timeout(timeout_s):
            while not condition(record):
                await asyncio.sleep(0.05)
                record = await store.get(job_id)
    except TimeoutError:
        raise AssertionError(record) from None
    return record


def ended(record: JobRecord) -> bool:
    return record.state.ended


async def test_a_source_that_never_opens_is_a_named_wait_that_can_be_cancelled_before_and_after_a_restart(
    store: JobStore, redis: Redis, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(named_wait, "FIRST_REPORT_S", 1.0)
    job_id = (await store.create(job_spec(data={"train": HANGS}))).id
    async with agent(redis, redis_url, tmp_path):
        waits = await until(store, job_id, lambda job: bool(job.cause))
        assert waits.state is JobState.STARTING
        assert waits.cause.startswith("its model and data are being read, for ")
    left = await store.get(job_id)
    assert left.state is JobState.STARTING, "a drain leaves it to the next agent"
    assert left.started_at == waits.started_at
    async with agent(redis, redis_url, tmp_path):
        await asyncio.sleep(2)
        await store.cancel(job_id)
        record = await until(store, job_id, ended, 20)
    assert (record.state, record.cause) == (JobState.CANCELLED, "cancelled on request")
    other = (await store.create(job_spec(data={"train": HANGS}))).id
    assert await store.claim("learner") is not None
    await store.cancel(other)
    async with agent(redis, redis_url, tmp_path):
        assert (await until(store, other, ended, 20)).state is JobState.CANCELLED


async def test_a_source_that_never_opens_fails_the_job_in_the_end(
    store: JobStore, redis: Redis, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "OPEN_S", 8.0)
    job_id = (await store.create(job_spec(data={"train": HANGS}))).id
    async with agent(redis, redis_url, tmp_path):
        record = await until(store, job_id, ended)
    assert (record.state, record.cause) == (JobState.FAILED, "data.train: was not read within 8 s")


@pytest.mark.parametrize(
    ("how", "cause", "times"),
    [
        ("raise", "rank 0: ValueError: {job_id}: head size 16 is not supported", MAX_LOAD_FAILURES),
        pytest.param("exit", "rank 0 ended with exit code 3", MAX_LOAD_FAILURES, marks=pytest.mark.slow),
        pytest.param("kill", "rank 0 was killed by SIGKILL", 1 + MAX_RESTARTS, marks=pytest.mark.slow),
    ],
)
async def test_ranks_that_die_while_they_load_say_so_at_once_and_end_the_job_with_their_words(
    store: JobStore,
    redis: Redis,
    redis_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    cause: str,
    times: int,
) -> None:
    monkeypatch.setattr(launch, "RANK_MODULE", "tests.integration.learner.dying_rank")
    monkeypatch.setenv("MILLRACE_TEST_DEATH", how)
    job_id = (await store.create(job_spec())).id
    cause = cause.format(job_id=job_id)
    async with agent(redis, redis_url, tmp_path):
        said = await until(store, job_id, lambda job: "started again" in job.cause or job.state.ended)
        # On a busy machine the last death may be seen together with the first.
        assert said.cause == (cause if said.state.ended else f"{cause}; the ranks are started again")
        record = await until(store, job_id, ended)
    assert (record.state, record.cause) == (JobState.FAILED, cause)
    deaths = await job_deaths.deaths(redis, job_id)
    assert [(death.worker, death.cause, death.loading) for death in deaths] == [("learner", cause, True)] * times
    stream: Any = await redis.xrange(keys.events(job_id))
    events = [json.loads(fields[b"d"]) for _, fields in stream]
    assert {"message": cause} in events


async def test_starts_without_a_step_are_bounded_over_agents_that_die_with_their_ranks(
    store: JobStore, redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    job_id = (await store.create(job_spec())).id
    (tmp_path / "jobs" / job_id / STARTS_FILE).write_text(json.dumps({"step": 0, "starts": MAX_STARTS}))
    async with agent(redis, redis_url, tmp_path):
        record = await until(store, job_id, ended)
    assert record.state is JobState.FAILED
    assert record.cause.startswith(f"the ranks were started {MAX_STARTS} times, and did no step; ")


@pytest.mark.slow
async def test_a_model_with_values_that_are_not_finite_is_refused_with_the_tensors_name(
    store: JobStore, redis: Redis, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_URL", redis_url)  # where real ranks find it
    model = tmp_path / "models" / "tiny"
    weights = load_file(model / "model.safetensors")
    name = next(name for name in weights if "q_proj.weight" in name)
    weights[name].view(-1)[3] = math.nan
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    job_id = (await store.create(job_spec())).id
    async with agent(redis, redis_url, tmp_path):
        record = await until(store, job_id, ended, 180)
    assert record.state is JobState.FAILED
    assert record.cause == f"model.path: {model} has values that are not finite: {name}"
    assert job_id not in await store.active()


@pytest.mark.parametrize("code", [0, 1])
async def test_a_job_that_was_deleted_before_its_agent_saw_its_end_has_ended(
    store: JobStore, redis: Redis, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    async def ends_and_is_deleted(_agent: Agent, record: JobRecord) -> int:
        if record.spec.name == "deleted":
            await store.transition(record.id, JobState.SUCCEEDED, allowed=[JobState.STARTING])
            assert await Retention(redis, store, Settings(home=tmp_path)).delete(record.id)
            return code
        await store.transition(record.id, JobState.SUCCEEDED, allowed=[JobState.STARTING])
        return 0

    monkeypatch.setattr(Agent, "_launch", ends_and_is_deleted)
    gone = (await store.create(job_spec(name="deleted"))).id
    after = (await store.create(job_spec())).id
    async with agent(redis, redis_url, tmp_path):
        await until(store, after, ended, 30)
    assert await store.find(gone) is None
    assert not (tmp_path / "jobs" / gone).exists()
    assert not await redis.keys(f"*{gone}*")
