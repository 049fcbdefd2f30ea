"""Samples as the model sees them: every special token of prompt and completion, decoded from the tokens that were recorded."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import redis.asyncio

from services.common.config.settings import Settings
from services.common.jobs.store import JobStore
from services.common.models.prompts import PromptEncoder
from services.common.spec.job import JobSpec
from services.common.streams.types import (
    FinishReason,
    Message,
    Purpose,
    Rollout,
    RolloutGroup,
    ScoredGroup,
    Task,
    Verdict,
    VerdictStatus,
    VersionSpan,
)
from services.gateway.admission.admission import Admission
from services.gateway.app import create_app
from services.reward.samples import GROUP_IDS, keep_sample

END = 1
"""The tokenizer's end of turn."""


@pytest.fixture
async def client(
    redis: redis.asyncio.Redis, home: Path, token: str, admission: Admission
) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(Settings(home=home), redis, token, admission=admission)
    headers = {"Authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://127.0.0.1", headers=headers, timeout=60.0
    ) as opened:
        yield opened


@pytest.fixture
async def job_id(store: JobStore, document: dict[str, Any]) -> str:
    return (await store.create(JobSpec.model_validate(document))).id


def ids(values: list[int]) -> bytes:
    return np.array(values, "<i4").tobytes()


def scored(job_id: str, prompt: list[int], response: list[int]) -> ScoredGroup:
    task = Task(job_id, 1, 7, 1, Purpose.TRAIN, (Message("user", "2 + 3 ="),), "gsm8k", "5", {}, 1, 1.0, 16, 4, 60.0)
    rollout = Rollout(ids(response), bytes(4 * len(response)), "5", FinishReason.STOP, (VersionSpan(0, 4),))
    verdict = Verdict(VerdictStatus.SCORED, 1.0, 1.0, "gsm8k")
    return ScoredGroup(RolloutGroup(task, "rollout-a", ids(prompt), (rollout,), 0.1), (verdict,), 0.1)


async def raw(client: httpx.AsyncClient, job_id: str) -> dict[str, Any]:
    answer = await client.get(f"/jobs/{job_id}/rollouts", params={"raw": "true"})
    assert answer.status_code == 200, answer.text
    sample: dict[str, Any] = answer.json()["samples"][0]
    return sample


async def test_prompt_and_completion_are_shown_with_the_tokens_that_the_text_leaves_out(
    client: httpx.AsyncClient, redis: redis.asyncio.Redis, home: Path, job_id: str
) -> None:
    encoder = PromptEncoder(home / "models" / "tiny")
    rendered = encoder.render([("user", "2 + 3 =")], 1000)
    prompt, answer = encoder.token_ids(rendered), [*encoder.encode_text("5"), END]
    await keep_sample(redis, scored(job_id, prompt, answer))
    sample = await raw(client, job_id)
    assert sample["raw_prompt"] == rendered
    stop = encoder.decode_raw([[END]])[0]
    assert stop
    assert (sample["rollouts"][0]["raw"], sample["rollouts"][0]["text"]) == (encoder.decode_raw([answer])[0], "5")
    assert sample["rollouts"][0]["raw"].endswith(stop)
    assert "token_ids" not in sample["rollouts"][0]
    assert "prompt_token_ids" not in sample


async def test_of_a_long_completion_the_end_is_shown_with_what_is_missing(
    client: httpx.AsyncClient, redis: redis.asyncio.Redis, home: Path, job_id: str
) -> None:
    encoder = PromptEncoder(home / "models" / "tiny")
    five = encoder.encode_text("5")
    await keep_sample(redis, scored(job_id, five, five * (GROUP_IDS + 10) + [END]))
    shown = (await raw(client, job_id))["rollouts"][0]["raw"]
    assert shown.startswith("[…11 tokens…]5")
    assert shown.endswith(encoder.decode_raw([[END]])[0])


async def test_a_model_that_is_gone_is_named_and_texts_without_special_tokens_are_still_there(
    client: httpx.AsyncClient, redis: redis.asyncio.Redis, home: Path, job_id: str
) -> None:
    await keep_sample(redis, scored(job_id, [5], [6, END]))
    (home / "models" / "tiny").rename(home / "models" / "gone")
    answer = await client.get(f"/jobs/{job_id}/rollouts", params={"raw": "true"})
    assert answer.status_code == 422
    assert "there is no model 'tiny'" in answer.text
    assert (await client.get(f"/jobs/{job_id}/rollouts")).json()["samples"][0]["rollouts"][0]["text"] == "5"
