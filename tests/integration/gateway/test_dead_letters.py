"""Dead letters over HTTP: what was put aside, why, and back on its stream once."""

from __future__ import annotations

import base64
import time
from typing import Any

import httpx
import msgpack
import pytest
import redis.asyncio

from services.common.jobs.record import JobState
from services.common.jobs.store import JobStore
from services.common.redis import keys
from services.common.redis.keys import Stage
from services.common.spec.job import JobSpec
from services.common.streams import consumer as consumer_module
from services.common.streams.consumer import DEAD_PAYLOAD_BYTES, Consumer, Entry
from services.common.streams.limits import MIN_ENTRY_BYTES
from services.common.streams.stream import add

Redis = redis.asyncio.Redis


@pytest.fixture
async def job(store: JobStore, document: dict[str, Any]) -> str:
    return (await store.create(JobSpec.model_validate(document))).id


def reader(redis: Redis, job: str, stage: Stage = Stage.ROLLOUTS, name: str = "reward-a") -> Consumer:
    return Consumer(redis, redis, job, stage, group="reward", name=name, limit_bytes=MIN_ENTRY_BYTES)


async def bury(redis: Redis, job: str, *payloads: bytes, stage: Stage = Stage.ROLLOUTS) -> list[Entry]:
    for number, payload in enumerate(payloads):
        await add(redis, job, stage, f"train:{number}:1", payload)
    consumer = reader(redis, job, stage)
    entries = await consumer.read(len(payloads), 0.5)
    for entry in entries:
        assert await consumer.dead_letter(entry, f"reason of {entry.member}")
    return entries


async def letters(client: httpx.AsyncClient, job: str, **query: Any) -> list[dict[str, Any]]:
    answer = await client.get(f"/jobs/{job}/dead-letters", params=query)
    assert answer.status_code == 200
    return list(answer.json()["letters"])


async def test_letters_are_listed_newest_first_with_what_is_known_of_them(
    client: httpx.AsyncClient, redis: Redis, job: str
) -> None:
    await bury(redis, job, b"one", b"two")
    await bury(redis, job, b"three", stage=Stage.TASKS)
    document = (await client.get(f"/jobs/{job}/dead-letters")).json()
    assert document["totals"] == {"tasks": 1, "rollouts": 2, "scored": 0}
    assert [(letter["stage"], letter["member"]) for letter in document["letters"]] == [
        ("tasks", "train:0:1"), ("rollouts", "train:1:1"), ("rollouts", "train:0:1"),
    ]  # fmt: skip
    newest = document["letters"][1]
    assert (newest["reason"], newest["deliveries"], newest["consumer"]) == ("reason of train:1:1", 1, "reward-a")
    assert (newest["size_bytes"], newest["whole"]) == (3, True)
    assert time.time() - 60 < newest["first_seen"] <= newest["last_seen"] < time.time() + 1
    assert "payload" not in newest


async def test_letters_come_page_by_page(client: httpx.AsyncClient, redis: Redis, job: str) -> None:
    await bury(redis, job, *(b"%d" % n for n in range(5)))
    first = await letters(client, job, stage="rollouts", limit=3)
    rest = await letters(client, job, stage="rollouts", limit=3, before=first[-1]["id"])
    assert [letter["member"] for letter in first + rest] == [f"train:{n}:1" for n in reversed(range(5))]
    assert await letters(client, job, stage="scored") == []


async def test_a_letter_shows_its_payload_and_what_it_says(client: httpx.AsyncClient, redis: Redis, job: str) -> None:
    content = {"task": {"group_id": 17, "text": "2 + 3"}, "token_ids": b"\x00" * 40, "odd": float("nan"), "none": None}
    packed = msgpack.packb(content)
    await bury(redis, job, packed, b"\xff\xfe", msgpack.packb([1, 2]), b"\x91" * 300)
    pages = [
        (await client.get(f"/jobs/{job}/dead-letters/rollouts/{letter['id']}")).json()
        for letter in reversed(await letters(client, job))
    ]
    assert base64.b64decode(pages[0]["payload"]) == packed
    assert pages[0]["content"] == {
        "task": {"group_id": 17, "text": "2 + 3"}, "token_ids": "40 bytes", "odd": "nan", "none": None,
    }  # fmt: skip
    assert [page["content"] for page in pages[1:]] == [None, None, None]


async def test_a_requeued_entry_is_delivered_as_if_it_were_new_and_its_letter_is_gone(
    client: httpx.AsyncClient, redis: Redis, job: str
) -> None:
    await bury(redis, job, b"payload")
    (letter,) = await letters(client, job)
    path = f"/jobs/{job}/dead-letters/rollouts/{letter['id']}"
    answer = await client.post(f"{path}/requeue")
    assert (answer.status_code, answer.json()) == (
        200, {"stage": "rollouts", "entry": letter["id"], "member": "train:0:1"},
    )  # fmt: skip
    assert (await client.post(f"{path}/requeue")).status_code == 404
    assert (await client.get(path)).status_code == 404
    consumer = reader(redis, job, name="reward-b")
    (entry,) = await consumer.read(5, 0.5)
    assert (entry.member, entry.payload, entry.deliveries) == ("train:0:1", b"payload", 1)
    assert await consumer.hop(entry, Stage.SCORED, b"scored")
    told: Any = await redis.xrevrange(keys.events(job), count=1)
    assert told[0][1][b"kind"] == b"requeued"


async def test_a_cut_letter_and_one_of_an_ended_job_cannot_be_put_back(
    client: httpx.AsyncClient, redis: Redis, store: JobStore, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer_module, "DEAD_BUDGET_BYTES", 10)
    await bury(redis, job, b"small", b"x" * (2 * DEAD_PAYLOAD_BYTES))
    cut, small = await letters(client, job)
    assert (cut["whole"], cut["size_bytes"]) == (False, 2 * DEAD_PAYLOAD_BYTES)
    answer = await client.post(f"/jobs/{job}/dead-letters/rollouts/{cut['id']}/requeue")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "conflict")
    assert "beginning of its payload" in answer.json()["error"]["message"]
    await store.transition(job, JobState.CANCELLED, allowed=[JobState.QUEUED])
    answer = await client.post(f"/jobs/{job}/dead-letters/rollouts/{small['id']}/requeue")
    assert answer.status_code == 409
    assert "is cancelled" in answer.json()["error"]["message"]
    assert await redis.xlen(keys.stream(job, Stage.ROLLOUTS)) == 0
    assert len(await letters(client, job)) == 2


@pytest.mark.parametrize("entry", ["1-0", "x", "..%2f1-0", "99999999999999999999-0", "-", "+", "(1-0"])
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_letter_that_is_not_there_is_not_found(
    client: httpx.AsyncClient, job: str, entry: str, method: str
) -> None:
    path = f"/jobs/{job}/dead-letters/rollouts/{entry}{'/requeue' if method == 'POST' else ''}"
    answer = await client.request(method, path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


async def test_a_stage_that_is_none_is_named(client: httpx.AsyncClient, job: str) -> None:
    answer = await client.get(f"/jobs/{job}/dead-letters/verdicts/1-0")
    assert answer.status_code == 422
    assert answer.json()["error"]["fields"][0]["field"] == "stage"
    answer = await client.get(f"/jobs/{job}/dead-letters", params={"stage": "verdicts"})
    assert answer.status_code == 422
