from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio

from services.common.jobs.kept_samples import KeptSamples
from services.common.jobs.store import JobStore
from services.common.redis import keys
from services.common.service.heartbeat import WorkerKind, WorkerStatus, remove_worker, write_heartbeat
from services.common.spec.job import JobSpec
from services.common.streams.types import (
    EnvironmentCall,
    FinishReason,
    Message,
    Purpose,
    Rollout,
    RolloutGroup,
    ScoredGroup,
    Task,
    Turn,
    Verdict,
    VerdictStatus,
    VersionSpan,
)
from services.reward.samples import keep_sample

Redis = redis.asyncio.Redis


@pytest.fixture
async def job_id(store: JobStore, document: dict[str, Any]) -> str:
    return (await store.create(JobSpec.model_validate(document))).id


async def write_steps(redis: Redis, job_id: str, steps: list[int]) -> None:
    await redis.rpush(keys.steps(job_id), *(json.dumps({"step": step, "reward": step / 10}) for step in steps))


async def steps_of(client: httpx.AsyncClient, job_id: str, **query: int) -> list[int]:
    answer = await client.get(f"/jobs/{job_id}/metrics", params=query)
    assert answer.status_code == 200
    return [item["step"] for item in answer.json()["steps"]]


async def test_a_new_job_has_an_empty_history(client: httpx.AsyncClient, job_id: str) -> None:
    assert (await client.get(f"/jobs/{job_id}/metrics")).json() == {"total": 0, "steps": [], "evals": []}
    assert (await client.get(f"/jobs/{job_id}/rollouts")).json() == {"archived": False, "samples": []}


async def test_history_is_read_from_a_step_on_and_without_one_from_the_end(
    client: httpx.AsyncClient, redis: Redis, job_id: str
) -> None:
    await write_steps(redis, job_id, list(range(1, 2501)))
    await redis.rpush(keys.evals(job_id), json.dumps({"step": 0, "avg_at_k": 0.25}))
    assert await steps_of(client, job_id) == list(range(1501, 2501))
    assert await steps_of(client, job_id, limit=3) == [2498, 2499, 2500]
    assert await steps_of(client, job_id, **{"from": 1, "limit": 2}) == [1, 2]
    assert await steps_of(client, job_id, **{"from": 100, "limit": 2000}) == list(range(100, 2100))
    assert await steps_of(client, job_id, **{"from": 2500}) == [2500]
    assert await steps_of(client, job_id, **{"from": 2501}) == []
    history = (await client.get(f"/jobs/{job_id}/metrics?limit=1")).json()
    assert history["total"] == 2500
    assert history["steps"] == [{"step": 2500, "reward": 250.0}]
    assert history["evals"] == [{"step": 0, "avg_at_k": 0.25}]


async def test_no_step_is_missed_where_a_rollback_repeated_some(
    client: httpx.AsyncClient, redis: Redis, job_id: str
) -> None:
    await write_steps(redis, job_id, [1, 2, 3, 4, 2, 3, 4, 5, 6])
    assert await steps_of(client, job_id, **{"from": 4}) == [4, 4, 5, 6]


@pytest.mark.parametrize("query", ["from=0", "from=x", "limit=0", "limit=10001"])
async def test_a_range_that_cannot_be_names_the_parameter(client: httpx.AsyncClient, job_id: str, query: str) -> None:
    answer = await client.get(f"/jobs/{job_id}/metrics?{query}")
    assert answer.status_code == 422
    assert answer.json()["error"]["fields"][0]["field"] == query.partition("=")[0]


async def test_what_is_no_json_object_is_left_out_and_nan_is_null(
    client: httpx.AsyncClient, redis: Redis, job_id: str
) -> None:
    await redis.rpush(
        keys.steps(job_id), '{"step": 1, "kl": NaN, "lr": 1e400}', "broken", "[1]", b"\xff", '{"step": 2}'
    )
    answer = await client.get(f"/jobs/{job_id}/metrics")
    assert answer.json()["steps"] == [{"step": 1, "kl": None, "lr": None}, {"step": 2}]


async def test_the_newest_samples_come_first(client: httpx.AsyncClient, redis: Redis, job_id: str) -> None:
    for group_id in range(30):
        await redis.lpush(
            keys.samples(job_id), json.dumps({"group_id": group_id, "rollouts": [{"text": "é \u2028 <b>"}]})
        )
    samples = (await client.get(f"/jobs/{job_id}/rollouts")).json()["samples"]
    assert [sample["group_id"] for sample in samples] == list(range(29, 9, -1))
    assert samples[0]["rollouts"][0]["text"] == "é \u2028 <b>"
    assert len((await client.get(f"/jobs/{job_id}/rollouts?limit=3")).json()["samples"]) == 3


async def test_samples_are_filtered_over_all_that_are_kept(
    client: httpx.AsyncClient, redis: Redis, job_id: str
) -> None:
    for group_id in range(30):
        rollouts = [
            {"text": f"text {group_id}", "accuracy": float(group_id != 3), "reward": 1.0, "finish_reason": "stop"}
        ]
        await redis.lpush(
            keys.samples(job_id), json.dumps({"group_id": group_id, "purpose": "train", "rollouts": rollouts})
        )
    for query, found in (
        ("wrong=true&limit=1", [3]),
        ("grep=TEXT%202&limit=3", [29, 28, 27]),
        ("group=0", [0]),
        ("purpose=eval", []),
    ):
        answer = await client.get(f"/jobs/{job_id}/rollouts?{query}")
        assert [sample["group_id"] for sample in answer.json()["samples"]] == found, query
    assert (await client.get(f"/jobs/{job_id}/rollouts?purpose=other")).status_code == 422


def kept_sample(step: int, group_id: int) -> dict[str, Any]:
    return {"group_id": group_id, "purpose": "train", "rollouts": [{"text": str(group_id), "max_policy_version": step}]}


async def test_samples_that_redis_has_forgotten_are_read_from_the_jobs_folder_and_each_is_shown_once(
    client: httpx.AsyncClient, redis: Redis, job_id: str, tmp_path: Path
) -> None:
    folder = tmp_path / "jobs" / job_id
    folder.mkdir(parents=True, exist_ok=True)
    KeptSamples(folder, 10).add([kept_sample(10, 1), kept_sample(20, 2), kept_sample(30, 3)], ended=False)
    for group_id, step in ((3, 30), (4, 31)):
        await redis.lpush(keys.samples(job_id), json.dumps(kept_sample(step, group_id)))
    for query, found in (
        ("", [4, 3, 2, 1]),
        ("?limit=3", [4, 3, 2]),
        ("?step=20", [2]),
        ("?step=30", [3]),
        ("?step=5", []),
    ):
        answer = (await client.get(f"/jobs/{job_id}/rollouts{query}")).json()
        assert [sample["group_id"] for sample in answer["samples"]] == found, query


async def test_workers_are_listed_while_their_heart_beats(client: httpx.AsyncClient, redis: Redis) -> None:
    assert (await client.get("/workers")).json() == {"workers": []}
    await write_heartbeat(
        redis,
        WorkerStatus("rollout-b", WorkerKind.ROLLOUT, "sampling", job_id="j", policy_version=3, detail={"q": 0.5}),
    )
    await write_heartbeat(redis, WorkerStatus("learner-a", WorkerKind.LEARNER, "idle"))
    workers = (await client.get("/workers")).json()["workers"]
    assert [(worker["name"], worker["kind"], worker["state"]) for worker in workers] == [
        ("learner-a", "learner", "idle"),
        ("rollout-b", "rollout", "sampling"),
    ]
    assert (workers[1]["policy_version"], workers[1]["detail"]) == (3, {"q": 0.5})
    metrics = (await client.get("/metrics")).text
    assert 'millrace_gateway_workers{kind="rollout"} 1.0' in metrics
    await remove_worker(redis, "rollout-b")
    await redis.pexpire(keys.worker("learner-a"), 1)
    await asyncio.sleep(0.05)
    assert (await client.get("/workers")).json() == {"workers": []}


async def test_the_samples_are_as_the_reward_service_writes_them(
    client: httpx.AsyncClient, redis: Redis, job_id: str
) -> None:
    task = Task(
        job_id, 1, 7, 1, Purpose.TRAIN, (Message("user", "2 + 3 ="),), "openai/gsm8k", "5", {}, 1, 1.0, 16, 4, 60.0
    )
    rollout = Rollout(b"\0" * 8, b"\0" * 8, "5", FinishReason.STOP, (VersionSpan(0, 4), VersionSpan(1, 5)))
    verdict = Verdict(VerdictStatus.SCORED, 1.0, 1.0, "gsm8k")
    await keep_sample(redis, ScoredGroup(RolloutGroup(task, "rollout-a", b"\0" * 4, (rollout,), 0.1), (verdict,), 0.1))
    [sample] = (await client.get(f"/jobs/{job_id}/rollouts")).json()["samples"]
    assert (sample["group_id"], sample["rollouts"][0]["text"], sample["rollouts"][0]["reward"]) == (7, "5", 1.0)
    assert sample["rollouts"][0]["max_policy_version"] == 5
    assert "token_ids" not in sample["rollouts"][0]
    refused = await client.get(f"/jobs/{job_id}/rollouts?raw=true&limit=51")
    assert (refused.status_code, "at most 50 groups" in refused.text) == (422, True)


HOSTILE = "\u202e\u2028\x00\ufffe\U0001f9ea e\u0301 <script>alert(1)</script> \\ud800 \"'"


async def test_an_episode_is_read_turn_by_turn_whatever_its_texts_say(
    client: httpx.AsyncClient, redis: Redis, job_id: str
) -> None:
    call = EnvironmentCall("calculator", {}, 17, 8, 16, 64, 2.0)
    task = Task(
        job_id, 1, 7, 1, Purpose.TRAIN, (), "environment:calculator", "", {}, 1, 1.0, 64, 4, 60.0, environment=call
    )
    turns = (
        Turn(0, 1, FinishReason.LENGTH, 0.5, (Message("user", HOSTILE),), HOSTILE),
        Turn(1, 1, FinishReason.STOP, None, (Message("tool", f"{HOSTILE} told"),), "done"),
    )
    rollout = Rollout(b"\0" * 12, b"\0" * 12, HOSTILE, FinishReason.STOP, (VersionSpan(0, 4),), turns)
    verdict = Verdict(VerdictStatus.SCORED, 1.0, 1.0, "environment", HOSTILE)
    await keep_sample(redis, ScoredGroup(RolloutGroup(task, "rollout-a", b"\0" * 4, (rollout,), 0.1), (verdict,), 0.1))
    [sample] = (await client.get(f"/jobs/{job_id}/rollouts")).json()["samples"]
    assert (sample["prompt"], sample["environment"], sample["environment_seed"]) == (HOSTILE, "calculator", 17)
    first, second = sample["rollouts"][0]["turns"]
    assert (first["said"], first["text"], first["reward"]) == ([{"role": "user", "content": HOSTILE}], HOSTILE, 0.5)
    assert (second["said"][0]["content"], second["text"], second["observed"]) == (f"{HOSTILE} told", "done", 1)
    for text, found in (("TOLD", 1), ("done", 1), (HOSTILE, 1), ("nothing", 0)):
        answer = await client.get(f"/jobs/{job_id}/rollouts", params={"grep": text})
        assert len(answer.json()["samples"]) == found, text


async def test_the_catalog_names_what_a_job_may_name(client: httpx.AsyncClient, tmp_path: Path) -> None:
    for name, text in {
        "models/tiny/config.json": '{"architectures": ["LlamaForCausalLM"]}',
        "data/rows.jsonl": "{}",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    answer = (await client.get("/catalog")).json()
    model = {"name": "tiny", "path": str(tmp_path / "models" / "tiny"), "architecture": "LlamaForCausalLM"}
    assert answer["models"] == [model | {"size_bytes": len('{"architectures": ["LlamaForCausalLM"]}')}]
    assert answer["data"] == [
        {"name": "rows.jsonl", "path": str(tmp_path / "data" / "rows.jsonl"), "architecture": "", "size_bytes": 2}
    ]
    assert "gsm8k" in answer["verifiers"]
