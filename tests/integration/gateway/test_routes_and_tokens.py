from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio
from fastapi import FastAPI

from services.common.config.settings import Settings
from services.common.jobs.record import JobState
from services.common.jobs.store import JobStore
from services.common.spec.job import JobSpec
from services.gateway.admission.admission import Admission
from services.gateway.app import create_app

GUARDED = [
    ("POST", "/jobs", 201),
    ("GET", "/jobs", 200),
    ("GET", "/jobs/schema", 200),
    ("GET", "/jobs/compare", 422),
    ("PATCH", "/jobs/{id}", 422),
    ("GET", "/jobs/{id}", 200),
    ("POST", "/jobs/{id}/cancel", 409),
    ("POST", "/jobs/{id}/pause", 409),
    ("POST", "/jobs/{id}/resume", 409),
    ("GET", "/jobs/{id}/metrics", 200),
    ("GET", "/jobs/{id}/ledger", 200),
    ("GET", "/jobs/{id}/rollouts", 200),
    ("GET", "/jobs/{id}/events", 200),
    ("GET", "/jobs/{id}/dead-letters", 200),
    ("GET", "/jobs/{id}/dead-letters/{stage}/{entry}", 422),
    ("POST", "/jobs/{id}/dead-letters/{stage}/{entry}/requeue", 422),
    ("GET", "/workers", 200),
    ("GET", "/catalog", 200),
    ("GET", "/v1/models", 200),
    ("GET", "/v1/models/{id}", 200),
    ("POST", "/v1/chat/completions", 400),
    ("POST", "/v1/completions", 400),
    ("GET", "/v1/embeddings", 404),
    ("GET", "/nothing/here", 404),
    ("DELETE", "/jobs/{id}", 204),
    ("POST", "/jobs/prune", 422),
    ("PUT", "/jobs/{id}", 405),
    ("PUT", "/workers", 405),
]
OPEN = ["/healthz", "/readyz", "/metrics", "/docs", "/openapi.json"]
WRONG = [{}, *({"Authorization": value} for value in ("", "Bearer", "Bearer wrong", "Basic dXNlcjpwYXNz"))]


@pytest.fixture
async def ended(store: JobStore, document: dict[str, Any]) -> str:
    record = await store.create(JobSpec.model_validate(document))
    await store.transition(record.id, JobState.CANCELLED, allowed=[JobState.QUEUED], export="/exported/hf")
    return record.id


def test_no_route_is_missing_from_this_file(app: FastAPI) -> None:
    described = {(method.upper(), path) for path, item in app.openapi()["paths"].items() for method in item}
    tested = {
        (method, path.replace("{id}", "{model}" if "/models/" in path else "{job_id}"))
        for method, path, status in GUARDED
        if status not in {404, 405}
    }
    assert described == tested | {("GET", path) for path in ("/healthz", "/readyz", "/metrics")}


@pytest.mark.parametrize(("method", "path", "status"), GUARDED)
async def test_a_guarded_route_answers_to_the_token_only(
    client: httpx.AsyncClient,
    stranger: httpx.AsyncClient,
    ended: str,
    document: dict[str, Any],
    method: str,
    path: str,
    status: int,
) -> None:
    path = path.replace("{id}", ended)
    body = document if (method, path) == ("POST", "/jobs") else None
    refusals = set()
    for wrong in WRONG:
        answer = await stranger.request(method, path, json=body, headers=wrong)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"].startswith("Bearer")
        refusals.add(answer.content)
    assert len(refusals) == 1
    answer = await client.request(method, path, json=body)
    assert answer.status_code == status
    if status >= 400:
        fields = {"fields"} if status == 422 else set()
        form = {"code", "message", "type", "param"} if path.startswith("/v1/") else {"code", "message"} | fields
        assert set(answer.json()["error"]) == form


@pytest.mark.parametrize("path", OPEN)
async def test_an_open_route_needs_no_token_on_loopback(stranger: httpx.AsyncClient, path: str) -> None:
    for headers in WRONG:
        assert (await stranger.get(path, headers=headers)).status_code == 200


@pytest.mark.parametrize("path", OPEN)
async def test_beyond_loopback_only_health_needs_no_token(
    redis: redis.asyncio.Redis, tmp_path: Path, token: str, unchecked: Admission, path: str
) -> None:
    settings = Settings(home=tmp_path, bind_host="192.0.2.1", gateway_hosts=["gateway"])
    transport = httpx.ASGITransport(create_app(settings, redis, token, admission=unchecked))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as opened:
        assert (await opened.get(path)).status_code == (200 if path in {"/healthz", "/readyz"} else 401)
        assert (await opened.get(path, headers={"Authorization": f"Bearer {token}"})).status_code == 200


@pytest.mark.parametrize(
    "job_id",
    [
        "demo-00000000",
        "demo",
        "x" * 300,
        "..%2f..%2fetc",
        "Demo-00000000",
        "demo-0000000g",
        "%00-00000000",
        "*-00000000",
    ],
)
@pytest.mark.parametrize("suffix", ["", "/metrics", "/ledger", "/rollouts", "/events"])
async def test_an_id_that_is_no_jobs_is_not_found_whatever_it_looks_like(
    client: httpx.AsyncClient, job_id: str, suffix: str
) -> None:
    answer = await client.get(f"/jobs/{job_id}{suffix}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


async def test_metrics_count_by_route_and_never_by_what_a_client_writes(client: httpx.AsyncClient) -> None:
    await client.get("/jobs/secret-path-00000000/metrics")
    await client.get("/another-secret-path")
    await client.request("BREW", "/jobs")
    text = (await client.get("/metrics")).text
    assert 'millrace_gateway_requests_total{method="GET",route="/jobs/{job_id}/metrics",status="404"} 1.0' in text
    assert 'route="unmatched",status="404"} 1.0' in text
    assert 'method="other"' in text
    assert "secret" not in text
    assert "BREW" not in text
    assert "millrace_gateway_redis_up 1.0" in text
