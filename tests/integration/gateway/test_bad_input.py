"""Bad jobs are refused when they are sent, by the checks that learner and reward servers use themselves."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio

from services.common.config.settings import Settings
from services.gateway.admission.admission import Admission
from services.gateway.app import create_app

GOOD_ROW = {"question": "2 + 3?", "answer": "2 + 3 = 5\n#### 5"}


@pytest.fixture
async def gateway(
    redis: redis.asyncio.Redis, home: Path, token: str, admission: Admission
) -> AsyncIterator[httpx.AsyncClient]:
    """With the real checks, and data files in its home."""
    data = home / "data"
    data.mkdir()
    rows = {
        "good.jsonl": [json.dumps(GOOD_ROW)] * 3,
        "empty.jsonl": [],
        "broken.jsonl": [json.dumps(GOOD_ROW), "", '{"question": '],
        "columns.jsonl": [json.dumps({"text": "2 + 3?"})],
        "unjudged.jsonl": [json.dumps({"prompt": "2 + 3?", "ground_truth": "5", "data_source": "my/own"})],
    }
    for name, lines in rows.items():
        (data / name).write_text("\n".join(lines))
    settings = Settings(home=home, gateway_hosts=["gateway"])
    transport = httpx.ASGITransport(create_app(settings, redis, token, admission=admission))
    headers = {"Authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=headers) as opened:
        yield opened


async def problems(gateway: httpx.AsyncClient, **sections: Any) -> list[tuple[str, str]]:
    document = {"model": {"path": "tiny"}, "data": {"train": {"source": "good.jsonl"}}, **sections}
    answer = await gateway.post("/jobs", json=document)
    assert (await gateway.get("/jobs")).json()["total"] == (1 if answer.status_code == 201 else 0)
    if answer.status_code == 201:
        return []
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "invalid_request"), answer.text
    return [(problem["field"], problem["message"]) for problem in answer.json()["error"]["fields"]]


@pytest.mark.parametrize(
    "train",
    [
        {"source": "good.jsonl"},
        {"source": "reasoning_gym:chain_sum", "config": {"max_terms": 2}},
        {"source": "unjudged.jsonl", "data_source": "openai/gsm8k"},
    ],
)
async def test_a_good_job_is_taken_in(gateway: httpx.AsyncClient, train: dict[str, Any]) -> None:
    assert await problems(gateway, data={"train": train}) == []


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("tinny", "no model 'tinny'"),
        ("/etc", "outside the allowed directories"),
        ("../models/tiny", "must not contain `..`"),
        ("tiny\0", "NUL"),
    ],
)
async def test_a_model_that_is_not_there_is_named(gateway: httpx.AsyncClient, path: str, words: str) -> None:
    [(field, message)] = await problems(gateway, model={"path": path})
    assert field == "model.path"
    assert words in message


@pytest.mark.parametrize("spoil", ["pytorch_model.bin", "modeling.py"])
async def test_a_model_with_code_in_it_names_the_file(gateway: httpx.AsyncClient, home: Path, spoil: str) -> None:
    (home / "models" / "tiny" / spoil).write_bytes(b"")
    [(field, message)] = await problems(gateway)
    assert field == "model.path"
    assert spoil in message


async def test_a_model_that_asks_for_remote_code_names_auto_map(gateway: httpx.AsyncClient, home: Path) -> None:
    path = home / "models" / "tiny" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": {"AutoModel": "modeling.Evil"}}))
    [(field, message)] = await problems(gateway)
    assert field == "model.path"
    assert "auto_map" in message


async def test_sizes_that_do_not_divide_name_the_setting_and_both_numbers(gateway: httpx.AsyncClient) -> None:
    found = await problems(gateway, learner={"tensor_parallel_size": 3})
    assert ("learner.tensor_parallel_size", "3 does not divide the model's 4 attention heads") in found
    assert {field for field, _ in found} == {"learner.tensor_parallel_size"}


@pytest.mark.parametrize("section", ["train", "eval"])
@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("missing.jsonl", "missing.jsonl is not there"),
        ("empty.jsonl", "has no rows"),
        ("broken.jsonl", "row 3"),
        ("columns.jsonl", "row 1"),
        ("../secret.jsonl", "must not contain `..`"),
        ("/etc/passwd.jsonl", "outside the allowed directories"),
        ("reasoning_gym:chain_summ", "chain_sum"),
    ],
)
async def test_bad_data_names_the_section_the_file_and_the_row(
    gateway: httpx.AsyncClient, section: str, source: str, words: str
) -> None:
    data = {"train": {"source": "good.jsonl"}, section: {"source": source}}
    [(field, message)] = await problems(gateway, data=data)
    assert field == f"data.{section}.source"
    assert words in message


async def test_an_unknown_setting_of_a_procedural_task_is_named(gateway: httpx.AsyncClient) -> None:
    data = {"train": {"source": "reasoning_gym:chain_sum", "config": {"max_term": 2}}}
    [(field, message)] = await problems(gateway, data=data)
    assert field == "data.train.config"
    assert "max_term" in message


async def test_an_unknown_verifier_is_named(gateway: httpx.AsyncClient) -> None:
    [(field, message)] = await problems(gateway, reward={"verifiers": {"my/own": "gsm9k"}})
    assert field == "reward.verifiers['my/own']"
    assert "gsm9k" in message


async def test_data_that_no_verifier_is_known_for_is_named(gateway: httpx.AsyncClient) -> None:
    data = {"train": {"source": "unjudged.jsonl"}}
    [(field, message)] = await problems(gateway, data=data)
    assert field == "data.train.data_source"
    assert "my/own" in message
    assert await problems(gateway, data=data, reward={"verifiers": {"my/own": "math"}}) == []


async def test_model_and_data_problems_are_told_together(gateway: httpx.AsyncClient) -> None:
    data = {"train": {"source": "empty.jsonl"}, "eval": {"source": "broken.jsonl"}}
    found = await problems(gateway, model={"path": "tinny"}, data=data, reward={"verifiers": {"*": "nope"}})
    assert {field for field, _ in found} == {
        "model.path",
        "data.train.source",
        "data.eval.source",
        "reward.verifiers['*']",
    }


@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_over_one_mebibyte_is_refused(gateway: httpx.AsyncClient, announced: bool) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(1024 + 1):
            yield b" " * 1024

    content = b" " * (1024 * 1024 + 1) if announced else chunks()
    answer = await gateway.post("/jobs", content=content, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


async def test_a_body_of_another_type_says_which_are_read(gateway: httpx.AsyncClient) -> None:
    answer = await gateway.post("/jobs", content="<job/>", headers={"Content-Type": "application/xml"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")
    assert "application/json, application/yaml, text/yaml" in answer.json()["error"]["message"]


async def test_a_body_of_very_many_problems_gets_a_short_answer(gateway: httpx.AsyncClient) -> None:
    document = {f"{'k' * 2000}{n}": 1 for n in range(400)}
    answer = await gateway.post("/jobs", json=document)
    assert answer.status_code == 422
    assert len(answer.json()["error"]["fields"]) == 100
    assert "of 402 problems" in answer.json()["error"]["message"]
    assert len(answer.content) < 300_000
