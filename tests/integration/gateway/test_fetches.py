"""Jobs that name a hub's model: `POST /jobs` to the queue, with the gateway that people run and a hub on this machine."""

# ruff: noqa: ARG001

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest
import redis.asyncio

from services.common.jobs.store import JobStore
from services.common.redis.keys import events as events_key
from services.common.spec.job import dump_spec
from tests.fake_hub import FakeHub
from tests.gateway_process import GatewayProcess, running, write_home
from tests.tiny_model import write_tiny_model

DATA = {"train": {"source": "reasoning_gym:chain_sum"}}


@pytest.fixture(scope="module")
def hub() -> Iterator[FakeHub]:
    with FakeHub() as started:
        yield started


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a tiny model that passes every check."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_model(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def variables(hub: FakeHub) -> dict[str, str]:
    return {"HF_ENDPOINT": hub.url, "MILLRACE_HUB_STALL_S": "5", "HF_TOKEN": "hf_secret", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def shared_gateway(
    redis_url: str, variables: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    with running(redis_url, write_home(tmp_path_factory.mktemp("gateway") / "home"), **variables) as started:
        yield started


@pytest.fixture
def gateway(shared_gateway: GatewayProcess, redis: redis.asyncio.Redis, hub: FakeHub) -> Iterator[GatewayProcess]:
    hub.repos.clear()
    hub.be_well()
    yield shared_gateway
    hub.be_well()
    shared_gateway.forget_jobs()


@pytest.fixture
async def people(gateway: GatewayProcess) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=gateway.url, headers=gateway.bearer, timeout=60) as client:
        yield client


async def submit(people: httpx.AsyncClient, path: str, **headers: str) -> httpx.Response:
    return await people.post("/jobs", json={"model": {"path": path}, "data": DATA}, headers=headers)


async def job_when(people: httpx.AsyncClient, job_id: str, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The job once this holds of it."""
    deadline = time.monotonic() + 60
    while not holds(job := (await people.get(f"/jobs/{job_id}")).json()):
        assert time.monotonic() < deadline, job
        time.sleep(0.1)  # noqa: ASYNC251  the gateway is another process
    return dict(job)


async def test_a_job_waits_with_its_progress_and_is_queued_once_its_model_is_there(
    people: httpx.AsyncClient,
    gateway: GatewayProcess,
    redis: redis.asyncio.Redis,
    hub: FakeHub,
    model: dict[str, bytes],
) -> None:
    store, large = JobStore(redis), os.urandom(1_500_000)
    commit = hub.add("models/org/tiny", model | {"tokenizer.model": large})
    hub.piece_s = 0.1
    answer = await submit(people, "hf:org/tiny@main")
    assert answer.status_code == 201, answer.text
    job = answer.json()
    pinned = f"hf:org/tiny@{commit}"
    assert (job["state"], job["spec"]["model"]["path"]) == ("queued", pinned)
    assert job["cause"] == f"model.path: {pinned} is being fetched"
    assert await store.claim("learner") is None
    await job_when(people, job["id"], lambda now: " % of 1." in now["cause"])
    hub.be_well()
    await job_when(people, job["id"], lambda now: not now["cause"])
    while (claimed := await store.claim("learner")) is None:
        await asyncio.sleep(0.05)
    assert claimed.id == job["id"]
    assert pinned in dump_spec(claimed.spec)
    assert " % of 1." in str(await redis.xrange(events_key(job["id"])))
    assert (gateway.home / "hubs/models/hf/org/tiny" / commit / "tokenizer.model").read_bytes() == large
    assert "hf_secret" not in gateway.log.read_text()
    assert "signature=" not in gateway.log.read_text()


async def test_jobs_of_one_model_share_its_fetch_and_the_next_needs_none(
    people: httpx.AsyncClient, hub: FakeHub, model: dict[str, bytes]
) -> None:
    hub.add("models/org/shared", model | {"tokenizer.model": os.urandom(300_000)})
    hub.piece_s = 0.1
    jobs = [(await submit(people, "hf:org/shared")).json() for _ in range(2)]
    for job in jobs:
        await job_when(people, job["id"], lambda now: not now["cause"])
    assert sum(item.store and "tokenizer.model" in item.path for item in hub.asked) == 1
    third = (await submit(people, jobs[0]["spec"]["model"]["path"])).json()
    assert third["cause"] == ""


async def test_a_job_is_cancelled_while_its_model_is_fetched(
    people: httpx.AsyncClient, gateway: GatewayProcess, hub: FakeHub, model: dict[str, bytes]
) -> None:
    commit = hub.add("models/org/slow", model | {"tokenizer.model": os.urandom(6_000_000)})
    hub.piece_s = 0.2
    job = (await submit(people, "hf:org/slow")).json()
    await job_when(people, job["id"], lambda now: "%" in now["cause"])
    cancelled = (await people.post(f"/jobs/{job['id']}/cancel")).json()
    assert cancelled["state"] == "cancelled"
    partial = gateway.home / "hubs/partial"
    deadline = time.monotonic() + 20
    while True:
        size = sum(path.stat().st_size for path in partial.rglob("*") if path.is_file())
        time.sleep(1.0)  # noqa: ASYNC251
        if size == sum(path.stat().st_size for path in partial.rglob("*") if path.is_file()):
            break
        assert time.monotonic() < deadline
    assert not (gateway.home / "hubs/models/hf/org/slow" / commit).exists()
    assert (await people.get(f"/jobs/{job['id']}")).json()["cause"] == "cancelled while queued"


async def test_a_job_that_is_deleted_while_its_model_is_fetched_is_waited_for_by_nobody(
    people: httpx.AsyncClient, redis: redis.asyncio.Redis, hub: FakeHub, model: dict[str, bytes]
) -> None:
    hub.add("models/org/slower", model | {"tokenizer.model": os.urandom(6_000_000)})
    hub.piece_s = 0.2
    job = (await submit(people, "hf:org/slower")).json()
    await job_when(people, job["id"], lambda now: "%" in now["cause"])
    await people.post(f"/jobs/{job['id']}/cancel")
    assert (await people.delete(f"/jobs/{job['id']}")).is_success
    deadline = time.monotonic() + 20
    while await JobStore(redis).fetching():
        await asyncio.sleep(0.2)
        assert time.monotonic() < deadline


async def test_data_of_a_hub_is_fetched_and_checked_as_a_file_is(
    people: httpx.AsyncClient, gateway: GatewayProcess, redis: redis.asyncio.Redis, hub: FakeHub
) -> None:
    row = {"prompt": "1 + 1 =", "data_source": "openai/gsm8k", "reward_model": {"ground_truth": "2"}}
    good = "".join(json.dumps(row | {"prompt": f"{number} + 1 ="}) + "\n" for number in range(9)).encode()
    commit = hub.add("datasets/org/sums", {"good.jsonl": good, "bad.jsonl": good + b"no row\n"})
    jobs = {}
    for name in ("good", "bad"):
        spec = {"model": {"path": "tiny"}, "data": {"train": {"source": f"hf:org/sums/{name}.jsonl"}}}
        jobs[name] = (await people.post("/jobs", json=spec)).json()
        assert jobs[name]["spec"]["data"]["train"]["source"] == f"hf:org/sums@{commit}/{name}.jsonl"
    ended = await job_when(people, jobs["bad"]["id"], lambda now: now["state"] != "queued")
    assert ended["state"] == "failed"
    assert "data.train.source: " in ended["cause"]
    assert "row 10" in ended["cause"]
    await job_when(people, jobs["good"]["id"], lambda now: not now["cause"])


async def test_a_reference_that_cannot_be_used_is_refused_with_its_field(
    people: httpx.AsyncClient, hub: FakeHub
) -> None:
    hub.add("models/org/pickles", {"config.json": b"{}", "pytorch_model.bin": b""})
    answer = await submit(people, "hf:org/pickles")
    (problem,) = answer.json()["error"]["fields"]
    assert (answer.status_code, problem["field"]) == (422, "model.path")
    assert problem["message"].startswith("hf:org/pickles: has its weights as pickles only")


async def test_a_hub_that_does_not_answer_is_a_reason_to_try_again(
    people: httpx.AsyncClient, hub: FakeHub, model: dict[str, bytes]
) -> None:
    hub.add("models/org/tiny", model)
    hub.repos["models/org/tiny"].status = 500
    answer = await submit(people, "hf:org/tiny")
    assert answer.status_code == 503, answer.text
    assert "answers 500; try again" in answer.json()["error"]["message"]


async def test_what_is_wrong_with_the_files_ends_the_job_with_the_field(
    people: httpx.AsyncClient, hub: FakeHub, model: dict[str, bytes]
) -> None:
    hub.add("models/org/torn", model | {"model.safetensors": b"no safetensors"})
    job = (await submit(people, "hf:org/torn")).json()
    ended = await job_when(people, job["id"], lambda now: now["state"] != "queued")
    assert ended["state"] == "failed"
    assert ended["cause"].startswith("model.path: ")
    assert "model.safetensors" in ended["cause"]


async def test_a_repeat_with_the_same_key_is_the_same_job_though_the_branch_has_moved(
    people: httpx.AsyncClient, hub: FakeHub, model: dict[str, bytes]
) -> None:
    hub.add("models/org/moving", model)
    first = await submit(people, "hf:org/moving@main", **{"Idempotency-Key": "once"})
    hub.add("models/org/moving", model | {"LICENSE": b"another"})
    again = await submit(people, "hf:org/moving@main", **{"Idempotency-Key": "once"})
    assert again.headers["Idempotency-Replayed"] == "true"
    assert again.json()["id"] == first.json()["id"]
    hub.repos["models/org/moving"].status = 500  # a repeat asks no hub
    again = await submit(people, "hf:org/moving@main", **{"Idempotency-Key": "once"})
    assert (again.status_code, again.json()["id"]) == (201, first.json()["id"])
