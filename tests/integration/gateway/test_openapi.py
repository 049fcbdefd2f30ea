from __future__ import annotations

import asyncio
import json
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from services.common.jobs.fates import FATES_FILE, Fate, FateLine
from services.common.jobs.record import JobState
from services.common.jobs.store import JobStore
from services.common.redis import keys
from services.common.redis.keys import Stage
from services.common.spec.job import JobSpec
from services.gateway.schemas import EXAMPLE_JOB_ID
from tests.gateway_process import GatewayProcess

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "unsupported_method",
    "allow_header_conformance",
    "missing_required_header",
    "ignored_auth",
)
"""Left out: checks that take a number in a string, or a model that is not there, for what it is not here."""


TURN = {"turn": 2, "said": [{"role": "tool", "content": "6"}], "text": "6", "observed": 3, "sampled": 1, "reward": None}
EPISODE = {"text": "calc:2*3 6", "reward": 1.0, "finish_reason": "turns", "max_policy_version": 4, "turns": [TURN]}
FAILED = {"text": "5", "reward": None, "accuracy": None, "status": "failed", "max_policy_version": 3}
SAMPLES: list[dict[str, Any]] = [
    {"group_id": 7, "rollouts": [FAILED]},
    {"group_id": 8, "environment": "calculator", "environment_seed": 17, "rollouts": [EPISODE]},
]
"""As an earlier release and as this one keeps them."""


@pytest.fixture
async def example_job(store: JobStore, redis: Redis, document: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A job under the id that the OpenAPI's examples name, with samples. It has ended, so that its event stream ends too."""
    monkeypatch.setattr(secrets, "token_hex", lambda _: EXAMPLE_JOB_ID.rpartition("-")[2])
    record = await store.create(JobSpec.model_validate(document))
    assert record.id == EXAMPLE_JOB_ID
    await store.transition(record.id, JobState.CANCELLED, allowed=[JobState.QUEUED])
    for sample in SAMPLES:
        await redis.lpush(keys.samples(record.id), json.dumps(sample))


LETTER_ID = "1760000000000-0"
"""The dead letter that the OpenAPI's examples name."""
LETTERS = {
    LETTER_ID: b"\x81\xa4note\xa4fine",
    "1760000000000-1": b"",
    "1760000000001-0": b"\x91" * 2000,
    "1760000000002-0": bytes(range(256)) * 300,
    "1760000000003-0": b"\x82\xa1a\xcb\x7f\xf8\0\0\0\0\0\0\xa1b\xa2\xed\xa0",
}


@pytest.fixture
async def troubled_job(
    store: JobStore, redis: Redis, document: dict[str, Any], process: GatewayProcess, monkeypatch: Any
) -> str:
    """A live job under the id that the OpenAPI's examples name, with dead letters of every stage, and fates of every kind."""
    monkeypatch.setattr(secrets, "token_hex", lambda _: EXAMPLE_JOB_ID.rpartition("-")[2])
    job_id = (await store.create(JobSpec.model_validate(document))).id
    for stage in Stage:
        for number, (letter_id, payload) in enumerate(LETTERS.items()):
            fields: Any = {
                "member": f"train:{number}:1", "d": payload, "size": len(payload), "reason": b"cannot be decoded: \xff",
                "deliveries": 1, "consumer": "reward-0", "first_seen": 1760000000.0, "last_seen": 1760000000.5,
            }  # fmt: skip
            await redis.xadd(keys.dead(job_id, stage), fields, id=letter_id)
    folder = process.home / "jobs" / job_id
    folder.mkdir(parents=True, exist_ok=True)
    fates = tuple((fate, "why: \N{SNOWMAN}", (2 * number, 2 * number + 1)) for number, fate in enumerate(Fate))
    (folder / FATES_FILE).write_text(FateLine(1, 1, 12, fates).dump(), encoding="utf-8")
    return job_id


def fuzz(
    process: GatewayProcess, folder: Path, *options: str, token: bool = True, media_type: str = "application/json"
) -> None:
    """Runs schemathesis with a fixed seed, and fails with what it said. Bodies are of one type: all are read into the same model."""
    if token:
        options += ("--header", f"Authorization: Bearer {process.token}")
    document = httpx.get(f"{process.url}/openapi.json", timeout=60).json()
    body = document["paths"]["/jobs"]["post"]["requestBody"]
    body["content"] = {media_type: body["content"][media_type]}
    (folder / "openapi.json").write_text(json.dumps(document))
    schemathesis = [sys.executable, "-m", "schemathesis.cli", "run", "openapi.json", "--url", process.url, "--no-color"]
    limits = ["--checks", ",".join(CHECKS), "--request-timeout", "60", "--seed", "1", "--no-shrink"]
    done = subprocess.run(
        [*schemathesis, *limits, *options], cwd=folder, capture_output=True, text=True, timeout=270, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    answered = [line for line in process.log.read_text().splitlines() if " -> 5" in line]
    assert not answered, answered


@pytest.mark.slow
@pytest.mark.usefixtures("example_job")
def test_no_request_makes_a_server_error_and_every_answer_fits_the_openapi(
    process: GatewayProcess, tmp_path: Path
) -> None:
    every = ("--phases", "examples,coverage,fuzzing")
    some = ("--phases", "examples,fuzzing", "--max-examples", "5")
    # Apart, so that no stream is opened on a job that schemathesis made and that nobody will ever end.
    fuzz(process, tmp_path, *every, "--max-examples", "3", "--include-operation-id", "job_events")
    others = ("--exclude-operation-id", "job_events", "--exclude-operation-id", "submit_job")
    fuzz(process, tmp_path, *every, "--max-examples", "5", *others)
    for media_type in ("application/json", "application/yaml"):
        fuzz(process, tmp_path, *some, "--include-operation-id", "submit_job", media_type=media_type)
    listed = httpx.get(f"{process.url}/jobs", headers=process.bearer).json()
    assert listed["total"] > 1, "no spec got through: the fuzzing never reached a created job"


@pytest.mark.slow
def test_no_field_of_a_spec_makes_a_server_error_whatever_stands_in_it(process: GatewayProcess, tmp_path: Path) -> None:
    fuzz(process, tmp_path, "--phases", "coverage", "--include-operation-id", "submit_job")


@pytest.mark.slow
@pytest.mark.usefixtures("example_job")
def test_without_a_token_every_answer_fits_the_openapi_too(process: GatewayProcess, tmp_path: Path) -> None:
    fuzz(process, tmp_path, "--phases", "examples,fuzzing", "--max-examples", "2", token=False)


@pytest.mark.slow
async def test_every_answer_about_dead_letters_and_fates_fits_the_openapi(
    process: GatewayProcess, redis: Redis, troubled_job: str, tmp_path: Path
) -> None:
    options = ("--phases", "examples,coverage,fuzzing", "--max-examples", "10")
    reads = ("list_dead_letters", "get_dead_letter", "job_ledger")
    for operations, taken in ((reads, False), (("requeue_dead_letter",), True)):
        chosen = (f"--include-operation-id={name}" for name in operations)
        await asyncio.to_thread(fuzz, process, tmp_path, *options, *chosen)
        left = {stage: await redis.xrange(keys.dead(troubled_job, stage), LETTER_ID, LETTER_ID) for stage in Stage}
        assert (not all(left.values())) is taken, "reading moves no letter, and putting back does"
    async with httpx.AsyncClient(base_url=process.url, headers=process.bearer) as client:
        ledger = (await client.get(f"/jobs/{troubled_job}/ledger")).json()
    assert (ledger["source"], ledger["total"]) == ("journal", 2 * len(Fate)), "the fates were not read"


async def test_every_operation_and_every_parameter_is_described(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    for path, item in document["paths"].items():
        for method, operation in item.items():
            assert operation["summary"], (path, method)
            assert operation["description"], (path, method)
            assert operation["operationId"]
            for parameter in operation.get("parameters", []):
                assert parameter["description"], (path, parameter["name"])
                assert parameter["schema"].get("examples") or parameter.get("examples"), (path, parameter["name"])
    for name in (
        "JobSpec",
        "JobSummary",
        "History",
        "Samples",
        "SampledRollout",
        "SampledTurn",
        "SampledMessage",
        "Worker",
        "ErrorDetail",
        "DeadLetterContent",
        "DeadLetters",
        "Requeued",
        "LedgerAnswer",
    ):
        for field, schema in document["components"]["schemas"][name]["properties"].items():
            assert "$ref" in schema or schema.get("description"), (name, field)
