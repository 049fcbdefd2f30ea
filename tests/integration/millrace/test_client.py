"""The Python client against a real gateway and a real Redis; the test plays the learner, through the job store, and a rollout server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from redis.asyncio import Redis

from millrace import AsyncClient, Client, Evaluated, GatewayError, JobFailedError, StateChanged, StepTrained
from services.common.jobs.record import LIVE, JobState
from services.common.jobs.store import JobStore
from services.common.redis import keys
from services.common.service.heartbeat import WorkerKind, WorkerStatus, write_heartbeat
from tests.gateway_process import GatewayProcess, running, write_home
from tests.integration.gateway.test_openai import serving

SPEC: dict[str, Any] = {
    "name": "demo", "model": {"path": "tiny"}, "data": {"train": {"source": "reasoning_gym:chain_sum"}}, "learner": {"steps": 2},
}  # fmt: skip
SAMPLE = {
    "group_id": 7, "purpose": "train", "prompt": "2 + 3 =", "ground_truth": "5",
    "rollouts": [
        {"text": "5", "reward": 1.0, "accuracy": 1.0, "finish_reason": "stop"},
        {"text": "it is 6", "reward": 0.0, "accuracy": 0.0, "finish_reason": "length"},
        {"text": "?", "reward": None, "accuracy": None, "finish_reason": "stop"},
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def shared(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    with running(redis_url, write_home(tmp_path_factory.mktemp("client") / "home"), MILLRACE_HUBS="[]") as started:
        yield started


@pytest.fixture
def gateway(shared: GatewayProcess, redis: Redis) -> Iterator[GatewayProcess]:  # noqa: ARG001  an empty one
    """Without the jobs of the tests before."""
    yield shared
    shared.forget_jobs()


@pytest.fixture
async def client(gateway: GatewayProcess) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(gateway.url, gateway.token) as opened:
        yield opened


async def train(store: JobStore, job_id: str, state: JobState = JobState.SUCCEEDED) -> None:
    """What a learner does with a job, as far as people see."""
    assert await store.claim("learner-a")
    await store.transition(job_id, JobState.RUNNING, allowed=LIVE)
    await store.history.append_eval(job_id, {"step": 0, "k": 8, "tasks": 4, "avg_at_k": 0.25, "avg_at_k_se": 0.1})
    for step in (1, 2):
        groups = {"trained": 4 * step}
        await store.history.append_step(job_id, step, {"step": step, "reward": step / 4, "groups": groups})
        await store.update(job_id, step=step, policy_version=step, reward=0.5)
    await store.transition(job_id, state, allowed=LIVE, cause="" if state is JobState.SUCCEEDED else "rank 0 died")


async def test_a_submitted_job_is_followed_to_its_end_with_typed_events(client: AsyncClient, redis: Redis) -> None:
    job = await client.submit(SPEC, {"learner.lr": 3e-6}, tags=["mine"])
    assert ((await job.spec())["learner"]["lr"], job.record["tags"]) == (3e-6, ["mine"])
    training = asyncio.create_task(train(JobStore(redis), job.id))
    events = [event async for event in job.follow()]
    await training
    assert [event.step for event in events if isinstance(event, StepTrained)] == [1, 2]
    assert [event.accuracy for event in events if isinstance(event, Evaluated)] == [0.25]
    assert isinstance(events[-1], StateChanged)
    assert (events[-1].state, job.state, job.record["step"]) == ("succeeded", "succeeded", 2)


async def test_a_failed_job_raises_with_the_learners_cause(client: AsyncClient, redis: Redis) -> None:
    job = await client.submit(SPEC)
    await train(JobStore(redis), job.id, JobState.FAILED)
    with pytest.raises(JobFailedError, match=f"job {job.id} failed at step 2 of 2: rank 0 died"):
        await job.wait()


async def test_metrics_and_evaluations_are_frames_by_step(client: AsyncClient, redis: Redis) -> None:
    job = await client.submit(SPEC)
    assert len(await job.metrics()) == 0
    await train(JobStore(redis), job.id)
    metrics, evaluations = await job.metrics(), await job.evaluations()
    assert metrics["reward"].to_dict() == {1: 0.25, 2: 0.5}
    assert metrics["groups.trained"].to_dict() == {1: 4, 2: 8}
    assert evaluations["avg_at_k"].to_dict() == {0: 0.25}


async def test_samples_are_rows_by_the_filters_of_the_gateway(client: AsyncClient, redis: Redis) -> None:
    job = await client.submit(SPEC)
    await redis.lpush(keys.samples(job.id), json.dumps(SAMPLE))
    everything = await job.samples()
    assert everything["text"].tolist() == ["5", "it is 6", "?"]
    assert set(everything["prompt"]) == {"2 + 3 ="}
    assert (await job.samples(wrong=True))["text"].tolist() == ["it is 6"]
    assert (await job.samples(failed=True))["text"].tolist() == ["?"]
    assert (await job.samples(truncated=True, grep="IT IS"))["text"].tolist() == ["it is 6"]
    assert len(await job.samples(purpose="eval")) == 0


async def test_a_sweep_is_compared_with_the_settings_that_differ(client: AsyncClient, redis: Redis) -> None:
    jobs = await client.sweep(SPEC, {"learner.lr": [1e-6, 3e-6]}, tags=["mine"])
    await train(JobStore(redis), jobs[0].id)
    frame = await client.compare(jobs)
    assert frame.index.tolist() == [job.id for job in jobs]
    assert frame["learner.lr"].tolist() == [1e-6, 3e-6]
    assert frame.loc[jobs[0].id, ["state", "reward", "best_avg_at_k"]].tolist() == ["succeeded", 0.5, 0.25]
    family = jobs[0].record["tags"][-1]
    assert {job.id for job in await client.jobs(tags=["mine", family])} == {job.id for job in jobs}
    assert [job.id for job in await client.jobs(state="queued")] == [jobs[1].id]


async def test_a_job_is_found_by_the_beginning_of_its_id_labelled_paused_resumed_and_cancelled(
    client: AsyncClient,
) -> None:
    submitted = await client.submit(SPEC)
    job = await client.job(submitted.id[:8])
    assert job.id == submitted.id
    await job.label(add=["kept"], notes="as in the paper")
    (listed,) = await client.jobs(name=job.id)
    assert (listed.record["tags"], listed.record["notes"]) == (["kept"], "as in the paper")
    assert (await listed.spec())["name"] == "demo"
    assert (await job.pause()).state == "paused"
    assert (await job.resume()).state == "queued"
    assert (await job.cancel()).state == "cancelled"
    again = await job.resubmit({"learner.steps": 5})
    assert (again.record["steps"], again.state) == (5, "queued")
    await job.delete()
    with pytest.raises(GatewayError) as caught:
        await job.refresh()
    assert caught.value.status == 404


async def test_a_check_queues_nothing_and_a_wrong_spec_names_its_fields(client: AsyncClient) -> None:
    found = await client.check(SPEC, response="it is 42")
    assert found["sections"]["train"]["prompts"]
    with pytest.raises(GatewayError, match=r"learner\.lr: "):
        await client.submit(SPEC, {"learner.lr": -1})
    assert await client.jobs() == []


async def test_a_policy_is_talked_to(client: AsyncClient, redis: Redis) -> None:
    job = await client.submit(SPEC)
    store = JobStore(redis)
    await store.transition(job.id, JobState.RUNNING, allowed=[JobState.QUEUED], policy_version=17)
    async with serving() as server:
        status: dict[str, Any] = {"job_id": job.id, "policy_version": 17, "inference_address": server.address}
        await write_heartbeat(redis, WorkerStatus("rollout-0", WorkerKind.ROLLOUT, "sampling", **status))
        assert await client.chat("hi", model=job, temperature=0.5, stop="END") == "Héllo!"
        async with await client.stream_chat([{"role": "user", "content": "hi"}], model=job.id) as answer:
            assert "".join([piece async for piece in answer]) == "Héllo!"
        assert (answer.finish_reason, answer.policy_version) == ("stop", {"min": 17, "max": 18})
    first = server.asked[0]
    assert ([message.content for message in first.chat.messages], first.temperature, list(first.stop)) == (
        ["hi"], 0.5, ["END"],
    )  # fmt: skip


async def test_the_blocking_client_does_the_same(gateway: GatewayProcess, redis: Redis) -> None:
    with Client(gateway.url, gateway.token) as client:
        job = await asyncio.to_thread(client.submit, SPEC)
        training = asyncio.create_task(train(JobStore(redis), job.id))
        assert (await asyncio.to_thread(job.wait, 30)).state == "succeeded"
        await training
        assert job.metrics().index.tolist() == [1, 2]
