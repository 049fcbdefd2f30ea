"""`GET /jobs/{id}/ledger`: the journal's fates where the gateway can read them, else the record's sums."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.common.jobs.fates import FATES_FILE, Fate, FateLine
from services.common.jobs.store import JobStore
from services.common.spec.job import JobSpec

LINES = [
    FateLine(1, 1, 8, ((Fate.TRAINED, "", (0, 1)), (Fate.FAILED, "a reward is not finite", (3,)))),
    FateLine(
        2, 2, 12, ((Fate.TRAINED, "", (4, 5)), (Fate.FAILED, "it was <late>\u2028", (6, 7)), (Fate.STALE, "old", (2,)))
    ),
]
SUMS = {"issued": 12, "active": 4, "trained": 4, "degenerate": 0, "stale": 1, "failed": 3, "cancelled": 0}


@pytest.fixture
async def job_id(store: JobStore, document: dict[str, Any]) -> str:
    return (await store.create(JobSpec.model_validate(document))).id


@pytest.fixture
def fates(tmp_path: Path, job_id: str) -> Path:
    path = tmp_path / "jobs" / job_id / FATES_FILE
    path.parent.mkdir(parents=True)
    path.write_text("".join(line.dump() for line in LINES))
    return path


async def ledger(client: httpx.AsyncClient, job_id: str, **query: str | int) -> dict[str, Any]:
    answer = await client.get(f"/jobs/{job_id}/ledger", params=query)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


@pytest.mark.usefixtures("fates")
async def test_the_fates_sum_to_the_groups_issued_and_reasons_are_counted(
    client: httpx.AsyncClient, job_id: str
) -> None:
    body = await ledger(client, job_id)
    assert {name: body[name] for name in SUMS} == SUMS
    assert (body["source"], body["step"], body["lineage"], body["total"]) == ("journal", 2, 2, 8)
    assert body["failed_reasons"] == {"it was <late>\u2028": 2, "a reward is not finite": 1}
    assert body["groups"][2] == {
        "group_id": 3, "fate": "failed", "step": 1, "lineage": 1, "reason": "a reward is not finite",
    }  # fmt: skip


@pytest.mark.usefixtures("fates")
async def test_one_fate_is_read_in_pages(client: httpx.AsyncClient, job_id: str) -> None:
    pages = [await ledger(client, job_id, fate="failed", offset=offset, limit=2) for offset in (0, 2, 4)]
    assert [[group["group_id"] for group in page["groups"]] for page in pages] == [[3, 6], [7], []]
    assert {page["total"] for page in pages} == {3}
    assert (await ledger(client, job_id, fate="cancelled"))["groups"] == []


async def test_without_the_journal_the_records_sums_are_told(
    client: httpx.AsyncClient, store: JobStore, job_id: str
) -> None:
    body = await ledger(client, job_id)
    assert {name: body[name] for name in SUMS} == dict.fromkeys(SUMS, 0)
    await store.update(job_id, step=2, lineage=2, groups=json.dumps(SUMS))
    body = await ledger(client, job_id, fate="failed")
    assert {name: body[name] for name in SUMS} == SUMS
    assert (body["source"], body["step"], body["groups"], body["failed_reasons"]) == ("record", 2, [], {})
    reasons = {"8 of 8 checks failed: ValueError: boom": 3}
    await store.update_in_redis(job_id, failure="ValueError: boom", failed_reasons=json.dumps(reasons))
    body = await ledger(client, job_id)
    assert (body["source"], body["failure"], body["failed_reasons"]) == ("record", "ValueError: boom", reasons)
    job = (await client.get(f"/jobs/{job_id}")).json()
    assert (job["failure"], job["failed_reasons"], job["groups"]["failed"]) == ("ValueError: boom", reasons, 3)


@pytest.mark.usefixtures("fates")
async def test_what_the_record_knows_since_the_journals_step_is_told(
    client: httpx.AsyncClient, store: JobStore, job_id: str
) -> None:
    since = SUMS | {"issued": 30, "failed": 20, "active": 5}
    accounts = {"groups": json.dumps(since), "failure": "boom", "failed_reasons": json.dumps({"boom": 20})}
    await store.update_in_redis(job_id, step=2, **accounts)
    body = await ledger(client, job_id)
    assert {name: body[name] for name in SUMS} == since
    assert (body["source"], body["failure"], body["failed_reasons"]) == ("journal", "boom", {"boom": 20})
    await store.update_in_redis(job_id, step=1, **accounts)
    assert (await ledger(client, job_id))["failed"] == SUMS["failed"], "the journal is a step ahead"


@pytest.mark.parametrize(
    "text", ["{}\n", "no json\n", '{"step": 1, "lineage": 1, "issued": 1, "fates": [["odd", "", []]]}\n']
)
async def test_a_file_that_is_none_is_not_an_error_of_the_reader(
    client: httpx.AsyncClient, fates: Path, job_id: str, text: str
) -> None:
    await asyncio.to_thread(fates.write_text, text)
    assert (await ledger(client, job_id))["source"] == "record"


@pytest.mark.parametrize("query", ["fate=odd", "offset=-1", "limit=0", "limit=1001"])
async def test_a_page_that_cannot_be_names_the_parameter(client: httpx.AsyncClient, job_id: str, query: str) -> None:
    answer = await client.get(f"/jobs/{job_id}/ledger?{query}")
    assert answer.status_code == 422
    assert answer.json()["error"]["fields"][0]["field"] == query.partition("=")[0]
