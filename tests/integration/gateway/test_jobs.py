from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
import redis.asyncio
import yaml

from services.common.jobs.record import JobState
from services.common.jobs.store import JobStore
from services.common.redis import keys
from services.common.spec.job import JobSpec, spec_schema

JobJson = dict[str, Any]


async def submit(client: httpx.AsyncClient, document: JobJson, key: str | None = None) -> httpx.Response:
    return await client.post("/jobs", json=document, headers={"Idempotency-Key": key} if key else {})


async def test_a_submitted_job_is_queued_and_can_be_read(
    client: httpx.AsyncClient, store: JobStore, redis: redis.asyncio.Redis, document: JobJson
) -> None:
    answer = await submit(client, document)
    job = answer.json()
    assert answer.status_code == 201
    assert answer.headers["location"] == f"/jobs/{job['id']}"
    assert (job["state"], job["step"], job["steps"]) == ("queued", 0, 100)
    assert JobSpec.model_validate(job["spec"]) == JobSpec.model_validate(document)
    assert (await client.get(answer.headers["location"])).json() == job
    assert (await store.get(job["id"])).spec == JobSpec.model_validate(document)
    assert await redis.zrange(keys.QUEUE, 0, -1) == [job["id"].encode()]


@pytest.mark.parametrize("media_type", ["application/yaml", "text/yaml"])
async def test_yaml_and_json_make_the_same_record(
    client: httpx.AsyncClient, document: JobJson, media_type: str
) -> None:
    document["learner"] = {"lr": 1e-6, "use_distributed_optimizer": True}
    by_json = (await submit(client, document)).json()
    answer = await client.post("/jobs", content=yaml.safe_dump(document), headers={"Content-Type": media_type})
    assert answer.status_code == 201
    own = {"id", "created_at"}
    assert {k: v for k, v in answer.json().items() if k not in own} == {
        k: v for k, v in by_json.items() if k not in own
    }


async def test_jobs_are_listed_newest_first_page_by_page(client: httpx.AsyncClient, document: JobJson) -> None:
    ids = [(await submit(client, {**document, "name": f"job-{n}"})).json()["id"] for n in range(5)]
    assert (await client.get("/jobs")).json()["total"] == 5
    pages = [
        (await client.get("/jobs", params={"limit": 2, "offset": offset})).json()["jobs"] for offset in (0, 2, 4, 6)
    ]
    assert [job["id"] for page in pages for job in page] == ids[::-1]
    assert [len(page) for page in pages] == [2, 2, 1, 0]
    assert all("spec" not in job for page in pages for job in page)


@pytest.mark.parametrize("query", ["limit=0", "limit=501", "limit=x", "offset=-1", "offset=99999999999999999999"])
async def test_a_page_that_cannot_be_names_the_parameter(client: httpx.AsyncClient, query: str) -> None:
    answer = await client.get(f"/jobs?{query}")
    assert answer.status_code == 422
    assert [problem["field"] for problem in answer.json()["error"]["fields"]] == [query.partition("=")[0]]


async def test_a_parameter_that_a_path_does_not_have_is_refused_by_name(
    client: httpx.AsyncClient, document: JobJson
) -> None:
    job_id = (await submit(client, document)).json()["id"]
    for path, name, message in (
        ("/jobs?limt=5", "limt", "is no parameter of this path; did you mean limit?"),
        (f"/jobs/{job_id}?spec=full", "spec", "is no parameter of this path"),
        (f"/jobs/{job_id}/rollouts?wrng=1&limit=2", "wrng", "is no parameter of this path; did you mean wrong?"),
    ):
        answer = await client.get(path)
        assert answer.status_code == 422
        assert answer.json()["error"]["fields"] == [{"field": name, "message": message}]
    refused = await client.post(f"/jobs/{job_id}/cancel?force=true")
    assert refused.status_code == 422
    assert (await client.get(f"/jobs/{job_id}")).json()["state"] == "queued"


async def test_jobs_are_found_by_tags_state_and_name_and_counted(client: httpx.AsyncClient, document: JobJson) -> None:
    ids = [
        (await submit(client, {**document, "name": f"job-{n}", "tags": ["all", f"n{n % 2}"]})).json()["id"]
        for n in range(5)
    ]
    await client.post(f"/jobs/{ids[4]}/cancel")

    async def found(query: str) -> tuple[int, list[int]]:
        answer = (await client.get(f"/jobs?{query}")).json()
        return answer["total"], [ids.index(job["id"]) for job in answer["jobs"]]

    assert await found("tag=n0") == (3, [4, 2, 0])
    assert await found("tag=n0&tag=all&limit=1&offset=1") == (3, [2])
    assert await found("tag=none") == (0, [])
    assert await found("state=cancelled") == (1, [4])
    assert await found("tag=n1&name=job-3&state=queued") == (1, [3])


async def test_tags_and_notes_are_the_specs_until_they_are_set(
    client: httpx.AsyncClient, store: JobStore, document: JobJson
) -> None:
    job = (await submit(client, {**document, "tags": ["a"], "notes": "first"})).json()
    path = f"/jobs/{job['id']}"
    assert (job["tags"], job["notes"]) == (["a"], "first")
    await client.post(f"{path}/cancel")
    changed = (await client.patch(path, json={"tags": ["b", "c"]})).json()
    assert (changed["tags"], changed["notes"], changed["spec"]["tags"]) == (["b", "c"], "first", ["a"])
    await client.patch(path, json={"notes": "second"})
    loaded = store.records.load(job["id"])
    assert loaded is None or (loaded.tags, loaded.notes) == (["b", "c"], "second")
    for body, field in (({"tags": ["no spaces"]}, "tags.0"), ({"tag": ["x"]}, "tag"), ({"notes": 7}, "notes")):
        refused = await client.patch(path, json=body)
        assert (refused.status_code, refused.json()["error"]["fields"][0]["field"]) == (422, field)


async def test_a_job_is_found_by_a_beginning_that_no_other_id_has(client: httpx.AsyncClient, document: JobJson) -> None:
    ids = [(await submit(client, {**document, "name": name})).json()["id"] for name in ("alpha", "alphabet", "beta")]
    for prefix, wanted in (("b", ids[2]), ("alphab", ids[1]), (ids[0], ids[0])):
        assert (await client.get(f"/jobs/{prefix}")).json()["id"] == wanted
    several = await client.get("/jobs/alpha")
    assert several.status_code == 404
    assert several.json()["error"]["message"] == f"alpha begins the ids of several jobs: {ids[1]}, {ids[0]}"
    assert (await client.post("/jobs/bet/cancel")).json()["id"] == ids[2]
    assert (await client.delete("/jobs/bet")).status_code == 404
    assert (await client.get(f"/jobs/{ids[2]}")).json()["state"] == "cancelled"


async def test_a_queued_job_is_cancelled_at_once_and_only_once(client: httpx.AsyncClient, document: JobJson) -> None:
    path = (await submit(client, document)).headers["location"]
    answer = await client.post(f"{path}/cancel")
    assert (answer.status_code, answer.json()["state"]) == (200, "cancelled")
    again = await client.post(f"{path}/cancel")
    assert (again.status_code, again.json()["error"]["code"]) == (409, "conflict")


async def test_a_running_jobs_learner_is_asked_to_stop(
    client: httpx.AsyncClient, store: JobStore, document: JobJson
) -> None:
    job_id = (await submit(client, document)).json()["id"]
    assert await store.claim("learner-a")
    job = (await client.post(f"/jobs/{job_id}/cancel")).json()
    assert (job["state"], job["cancel_requested"], job["learner"]) == ("starting", True, "learner-a")


async def test_the_schema_is_the_specs_own(client: httpx.AsyncClient) -> None:
    assert (await client.get("/jobs/schema")).json() == spec_schema()


async def test_a_repeated_key_makes_one_job(client: httpx.AsyncClient, document: JobJson) -> None:
    first, second = await submit(client, document, "k-1"), await submit(client, document, "k-1")
    assert (first.status_code, second.status_code) == (201, 201)
    assert first.json() == second.json()
    assert "idempotency-replayed" not in first.headers
    assert second.headers["idempotency-replayed"] == "true"
    assert second.headers["location"] == first.headers["location"]
    assert (await submit(client, document, "k-2")).json()["id"] != first.json()["id"]
    assert (await client.get("/jobs")).json()["total"] == 2


async def test_a_repeated_key_shows_the_job_as_it_is_now(client: httpx.AsyncClient, document: JobJson) -> None:
    path = (await submit(client, document, "k")).headers["location"]
    await client.post(f"{path}/cancel")
    assert (await submit(client, document, "k")).json()["state"] == "cancelled"


async def test_the_same_spec_in_yaml_is_the_same_request(client: httpx.AsyncClient, document: JobJson) -> None:
    first = await submit(client, document, "k")
    headers = {"Idempotency-Key": "k", "Content-Type": "text/yaml"}
    second = await client.post("/jobs", content=yaml.safe_dump(document), headers=headers)
    assert second.json()["id"] == first.json()["id"]


async def test_a_key_used_for_another_spec_is_refused(client: httpx.AsyncClient, document: JobJson) -> None:
    await submit(client, document, "k")
    answer = await submit(client, {**document, "name": "other"}, "k")
    assert answer.status_code == 422
    assert answer.json()["error"]["fields"][0]["field"] == "Idempotency-Key"
    assert (await client.get("/jobs")).json()["total"] == 1


async def test_requests_that_race_with_one_key_make_one_job(client: httpx.AsyncClient, document: JobJson) -> None:
    answers = await asyncio.gather(*(submit(client, document, "k") for _ in range(20)))
    assert {answer.status_code for answer in answers} == {201}
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert (await client.get("/jobs")).json()["total"] == 1


async def test_a_refused_spec_does_not_use_up_its_key(client: httpx.AsyncClient, document: JobJson) -> None:
    assert (await submit(client, {**document, "extra": 1}, "k")).status_code == 422
    assert (await submit(client, document, "k")).status_code == 201


async def test_keys_are_forgotten_in_the_end_and_never_stored_in_clear(
    client: httpx.AsyncClient, redis: redis.asyncio.Redis, document: JobJson
) -> None:
    await submit(client, document, "my-own-key")
    assert 23 * 3600 < await redis.ttl(keys.idempotency("my-own-key")) <= 24 * 3600
    assert not [name async for name in redis.scan_iter("*my-own-key*")]


@pytest.mark.parametrize("key", ["", "two words", "x" * 201, "ü"])
async def test_a_key_that_cannot_be_one_is_named(client: httpx.AsyncClient, document: JobJson, key: str) -> None:
    answer = await client.post("/jobs", json=document, headers={b"Idempotency-Key": key.encode("latin-1")})
    assert answer.status_code == 422
    assert answer.json()["error"]["fields"][0]["field"] == "Idempotency-Key"


async def test_a_job_ended_by_nobody_keeps_its_cause(
    client: httpx.AsyncClient, store: JobStore, document: JobJson
) -> None:
    job_id = (await submit(client, document)).json()["id"]
    await store.transition(job_id, JobState.FAILED, allowed=[JobState.QUEUED], cause="rank 1 died")
    job = (await client.get(f"/jobs/{job_id}")).json()
    assert (job["state"], job["cause"]) == ("failed", "rank 1 died")
    assert job["finished_at"] >= job["created_at"]
