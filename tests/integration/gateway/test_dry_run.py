"""A submission tried without being queued: real checks, a real tokenizer, a real Redis, and a reward server's own scorers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio

from services.common.config.settings import Settings
from services.common.redis import keys
from services.common.service.heartbeat import WorkerKind, WorkerStatus, write_heartbeat
from services.common.service.lifecycle import Drain
from services.gateway.admission import dry_run
from services.gateway.admission.admission import Admission
from services.gateway.app import create_app
from services.reward.dispatch import Dispatch
from services.reward.pool.pool import Pool
from services.reward.trials import Trials

DRY = {"dry_run": "true"}
REWARD = WorkerStatus("reward-1", WorkerKind.REWARD, "idle")
ROWS = [
    {"prompt": "What is 20 + 22?", "data_source": "openai/gsm8k", "reward_model": {"ground_truth": "42"}},
    {"prompt": "What is 1 + 1?", "data_source": "openai/gsm8k", "reward_model": {"ground_truth": "2"}},
    {"prompt": "x" * 500, "data_source": "openai/gsm8k", "reward_model": {"ground_truth": "3"}},
    {"prompt": "y" * 500, "data_source": "openai/gsm8k", "reward_model": {"ground_truth": "4"}},
]


@pytest.fixture
async def client(
    redis: redis.asyncio.Redis, home: Path, token: str, admission: Admission
) -> AsyncIterator[httpx.AsyncClient]:
    (home / "data").mkdir()
    (home / "data" / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    app = create_app(Settings(home=home), redis, token, admission=admission)
    headers = {"Authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://127.0.0.1", headers=headers, timeout=60.0
    ) as opened:
        yield opened


@pytest.fixture
async def reward_server(redis: redis.asyncio.Redis) -> AsyncIterator[None]:
    """The loop of trials of a reward server."""
    await write_heartbeat(redis, REWARD)
    async with Pool(2) as pool:
        drain = Drain()
        trials = Trials(redis, lambda spec: Dispatch(spec, pool.sibling(), Settings()), drain)
        loop = asyncio.create_task(trials.run())
        yield
        drain.request()
        await loop


@pytest.fixture
def spec() -> dict[str, Any]:
    return {
        "name": "demo", "model": {"path": "tiny", "max_model_len": 256}, "data": {"train": {"source": "rows.jsonl"}},
        "rollout": {"rollout_max_tokens": 100},
    }  # fmt: skip


async def checked(client: httpx.AsyncClient, spec: dict[str, Any], **params: str) -> dict[str, Any]:
    answer = await client.post("/jobs", json=spec, params=DRY | params)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.usefixtures("reward_server")
async def test_a_dry_run_shows_prompts_and_lengths_and_queues_nothing(
    client: httpx.AsyncClient, redis: redis.asyncio.Redis, spec: dict[str, Any]
) -> None:
    found = await checked(client, spec)
    train = found["sections"]["train"]
    assert (train["tasks"], train["counted"], train["room"], train["too_long"], train["refused"]) == (4, 4, 156, 2, 0)
    assert [prompt["index"] for prompt in train["prompts"]] == [0, 1, 2]
    assert "What is 20 + 22?" in train["prompts"][0]["text"]
    assert train["prompts"][0]["tokens"] >= train["shortest"] > 0
    assert train["shortest"] <= train["median"] <= train["longest"]
    assert (found["unchecked"], found["notes"]) == ([], [])
    assert found["spec"]["learner"]["steps"] == 100
    assert not await redis.exists(keys.QUEUE, keys.JOBS, keys.TRIALS)


@pytest.mark.usefixtures("reward_server")
async def test_references_and_a_response_of_ones_own_are_judged_as_the_job_would(
    client: httpx.AsyncClient, spec: dict[str, Any]
) -> None:
    [first, second, _] = (await checked(client, spec, try_response="so it is 42"))["sections"]["train"]["references"]
    assert (first["verifier"], first["right"], first["ground_truth"]) == ("gsm8k", True, "42")
    assert "#### …" in first["accepted"]
    assert (first["response"]["accuracy"], second["response"]["accuracy"]) == (1.0, 0.0)
    spec["reward"] = {"verifiers": {"*": "format"}, "config": {"format": {"format_pattern": "never so"}}}
    [first, *_] = (await checked(client, spec))["sections"]["train"]["references"]
    assert (first["verifier"], first["right"], first["accepted"], first["response"]) == ("format", False, [], None)
    assert first["detail"]


async def test_without_a_reward_server_the_rest_is_shown_and_the_request_withdrawn(
    client: httpx.AsyncClient, redis: redis.asyncio.Redis, spec: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await checked(client, spec))["notes"] == ["references were not judged: no reward server is running"]
    await write_heartbeat(redis, REWARD)  # of one that stands still
    monkeypatch.setattr(dry_run, "TRIAL_S", 1.0)
    found = await checked(client, spec)
    assert found["notes"] == ["references were not judged: no reward server has answered within 1 s"]
    assert found["sections"]["train"]["references"] == []
    assert len(found["sections"]["train"]["prompts"]) == 3
    assert not await redis.exists(keys.TRIALS)


async def test_a_dry_run_refuses_what_a_submission_refuses(client: httpx.AsyncClient, spec: dict[str, Any]) -> None:
    spec["model"]["path"] = "absent"
    answers = [await client.post("/jobs", json=spec, params=params) for params in ({}, DRY)]
    assert [answer.status_code for answer in answers] == [422, 422]
    assert answers[0].json() == answers[1].json()


async def test_a_base_model_is_prompted_by_the_jobs_own_template(
    client: httpx.AsyncClient, spec: dict[str, Any], home: Path
) -> None:
    (home / "models" / "tiny" / "chat_template.jinja").unlink(missing_ok=True)
    (home / "models" / "tiny" / "tokenizer_config.json").write_text("{}")
    refused = await client.post("/jobs", json=spec, params=DRY)
    assert "model.chat_template of the job gives one" in refused.text
    spec["model"]["chat_template"] = "{% for m in messages %}Q: {{ m['content'] }}\nA:{% endfor %}"
    prompts = (await checked(client, spec))["sections"]["train"]["prompts"]
    assert prompts[0]["text"] == "Q: What is 20 + 22?\nA:"
