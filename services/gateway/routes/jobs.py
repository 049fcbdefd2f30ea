"""Jobs: submitted, listed, read, paused, resumed and cancelled."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from redis.asyncio import Redis
from starlette.exceptions import HTTPException

from services.common.errors import ConfigError
from services.common.jobs.record import LIVE, JobRecord, JobState
from services.common.redis import keys
from services.common.service.heartbeat import WorkerKind, WorkerStatus, live_workers
from services.common.spec.job import JobSpec, spec_schema
from services.gateway.admission.dry_run import dry_run as run_dry
from services.gateway.admission.spec_body import MEDIA_TYPES, UnsupportedMediaType, media_type_of
from services.gateway.dependencies import GUARDS, Context, ContextDep, RecordDep
from services.gateway.errors import IDEMPOTENCY_KEY, SpecRefused, documented
from services.gateway.schemas import EXAMPLE_JOB_ID, EXAMPLE_SPEC, Job, JobCheck, JobList, JobSummary, Labels
from services.gateway.search import JobOrder, JobSearch

router = APIRouter(prefix="/jobs", tags=["jobs"], dependencies=GUARDS)

IdempotencyKeyDep = Annotated[
    str | None,
    Header(
        alias=IDEMPOTENCY_KEY,
        min_length=1,
        max_length=200,
        pattern=r"^[!-~]+$",
        description="Any token of your own. Repeating a request with the same key and spec gives the same job.",
        examples=["5f0c2d8e-submit-demo"],
    ),
]

TryResponseDep = Annotated[
    str | None,
    Query(
        max_length=4000,
        description="A response of your own, which a dry run judges for each of the first tasks.",
        examples=["The answer is 5."],
    ),
]

MAX_SEARCHED = 100_000
"""Newest jobs among which a search looks."""
_BODY = {
    "required": True,
    "description": "The job spec; `GET /jobs/schema` describes it. Keys that it does not know are refused.",
    "content": {
        media_type: {
            "schema": {"$ref": "#/components/schemas/JobSpec"},
            "examples": {"demo": {"summary": "A small arithmetic job", "value": EXAMPLE_SPEC}},
        }
        for media_type in MEDIA_TYPES
    },
}
_CHECKED: dict[str, Any] = {"model": JobCheck, "description": "The result of a dry run."}
_CREATED: dict[str, Any] = {
    "model": Job,
    "description": "The job was taken in, or had been under the same Idempotency-Key.",
    "headers": {
        "Location": {"description": "The job's path.", "schema": {"type": "string"}},
        "Idempotency-Replayed": {
            "description": "`true` when the job had been taken in before.", "schema": {"type": "string"},
        },
    },
    "links": {
        "job": {"operationId": "get_job", "parameters": {"job_id": "$response.body#/id"}},
        "pause": {"operationId": "pause_job", "parameters": {"job_id": "$response.body#/id"}},
        "cancel": {"operationId": "cancel_job", "parameters": {"job_id": "$response.body#/id"}},
    },
}  # fmt: skip


@router.post(
    "",
    operation_id="submit_job",
    summary="Submit a job",
    status_code=201,
    responses={200: _CHECKED, 201: _CREATED, **documented(408, 409, 413, 415, 422)},
    openapi_extra={"requestBody": _BODY},
)
async def submit(
    context: ContextDep,
    request: Request,
    response: Response,
    idempotency_key: IdempotencyKeyDep = None,
    *,
    dry_run: Annotated[
        bool,
        Query(description="Queue nothing: check, and show what the first tasks will meet.", examples=[False]),
    ] = False,
    try_response: TryResponseDep = None,
) -> Job | JobCheck:
    """Checks the spec, its model, its data and its verifiers, and queues the job. Jobs run one at a time per learner.

    What the spec names of a hub is looked up here, and fetched while the job is queued; its `cause` says how far that is.

    A dry run queues nothing. It shows the first prompts as the model will see them, counts all prompts against the context, and lets a
    reward server judge their references, and `try_response`, as the job would.
    """
    try:
        sent = await context.admission.read(await request.body(), media_type_of(request))
        if dry_run:
            response.status_code = 200
            return await _checked(context, sent, try_response)
        await context.restorer.restore_lost()  # restores an idempotency key that Redis has lost
        if idempotency_key and (known := await context.store.created_with(idempotency_key, sent)):
            return _answered(response, known, new=False)
        resolved = await context.fetches.resolve(sent)
        spec = resolved.spec
        unchecked = await context.admission.admit(spec, missing=resolved.missing.keys())
    except UnsupportedMediaType as error:
        raise HTTPException(415, str(error)) from error
    except SpecRefused:
        context.metrics.refused.inc()
        raise

    try:
        async with context.retention.using(spec):
            record, new = await context.store.create_once(spec, idempotency_key, sent=sent, fetching=resolved.cause)
    except ConfigError as error:
        raise SpecRefused(str(error), field="checkpoint.load") from error
    if new:
        context.metrics.submitted.inc()
        if unchecked:
            await context.store.report_unchecked(record.id, unchecked)
    return _answered(response, record, new=new)


async def _checked(context: Context, sent: JobSpec, try_response: str | None) -> JobCheck:
    resolved = await context.fetches.resolve(sent)
    missing = list(resolved.missing)
    return await run_dry(resolved.spec, context.admission, context.redis, response=try_response, missing=missing)


def _answered(response: Response, record: JobRecord, *, new: bool) -> Job:
    if not new:
        response.headers["Idempotency-Replayed"] = "true"
    response.headers["Location"] = f"/jobs/{record.id}"
    return Job.model_validate(record)


@router.get("", operation_id="list_jobs", summary="List jobs", responses=documented(422))
async def list_jobs(
    context: ContextDep,
    limit: Annotated[int, Query(ge=1, le=500, description="Most jobs to return.", examples=[20])] = 100,
    offset: Annotated[int, Query(ge=0, le=1_000_000, description="Jobs to skip, from the newest.", examples=[0])] = 0,
    tag: Annotated[
        list[str] | None,
        Query(max_length=32, description="Only jobs with this tag; repeat it for each.", examples=[["ablation"]]),
    ] = None,
    state: Annotated[JobState | None, Query(description="Only jobs in this state.", examples=["running"])] = None,
    name: Annotated[
        str | None, Query(max_length=100, description="Only jobs with this text in their id.", examples=["demo"])
    ] = None,
    search: Annotated[
        str,
        Query(
            max_length=200,
            description="Only jobs with each of these words in their id, tags, notes, model or data.",
            examples=["smollm2 gsm8k"],
        ),
    ] = "",
    sort: Annotated[
        JobOrder, Query(description="What they are ordered by.", examples=["best_score"])
    ] = JobOrder.SUBMITTED,
    ascending: Annotated[bool, Query(description="From the least on.", examples=[False])] = False,
) -> JobList:
    """Jobs without their specs, newest first or in another order."""
    wanted = JobSearch(frozenset(tag or ()), state, name or "", search, sort, ascending)
    if wanted == JobSearch():
        rows = await context.store.list(offset=offset, limit=limit)
        total = int(await context.redis.zcard(keys.JOBS))
    else:
        found = wanted.select(await context.store.list(limit=MAX_SEARCHED), time.time())
        total, rows = len(found), found[offset : offset + limit]
    return JobList(total=total, jobs=[JobSummary.model_validate(row) for row in rows])


@router.get("/schema", operation_id="job_schema", summary="JSON schema of the job spec", responses=documented(422))
async def schema() -> dict[str, Any]:
    """The JSON schema of what `POST /jobs` takes."""
    return spec_schema()


@router.get("/{job_id}", operation_id="get_job", summary="Read a job", responses=documented(404, 422))
async def get_job(context: ContextDep, record: RecordDep) -> Job:
    """The job's record and its resolved spec."""
    return Job.model_validate(await with_cause(context.redis, record))


@router.patch(
    "/{job_id}",
    operation_id="label_job",
    summary="Set a job's tags and notes",
    responses=documented(404, 408, 409, 413, 422),
)
async def label(context: ContextDep, record: RecordDep, labels: Labels) -> Job:
    """Sets what the body has, in any state of the job; the spec keeps what was submitted."""
    return Job.model_validate(await context.store.label(record.id, tags=labels.tags, notes=labels.notes))


@router.post(
    "/{job_id}/cancel",
    operation_id="cancel_job",
    summary="Cancel a job",
    response_description=f"The record, e.g. of `{EXAMPLE_JOB_ID}`: cancelled, or with `cancel_requested`.",
    responses=documented(404, 408, 409, 413, 422),
)
async def cancel(context: ContextDep, record: RecordDep) -> Job:
    """Cancels a queued job at once and asks the learner of a running one to stop; 409 when the job has ended."""
    return Job.model_validate(await context.store.cancel(record.id))


@router.post(
    "/{job_id}/pause",
    operation_id="pause_job",
    summary="Pause a job",
    response_description=f"The record, e.g. of `{EXAMPLE_JOB_ID}`: paused, or with `pause_requested`.",
    responses=documented(404, 408, 409, 413, 422),
)
async def pause(context: ContextDep, record: RecordDep) -> Job:
    """Holds a queued job back at once. The learner of a running one finishes the step under way, saves a checkpoint and waits.

    Learner and rollout servers stay with the job, so that it goes on at once when resumed. Pausing twice is pausing once; 409 when the
    job has ended.
    """
    return Job.model_validate(await context.store.pause(record.id))


@router.post(
    "/{job_id}/resume",
    operation_id="resume_job",
    summary="Resume a paused job",
    response_description=f"The record, e.g. of `{EXAMPLE_JOB_ID}`: queued again, or `paused` until its learner goes on.",
    responses=documented(404, 408, 409, 413, 422),
)
async def resume(context: ContextDep, record: RecordDep) -> Job:
    """Goes on with the next step; 409 when the job is not paused and was not asked to be."""
    return Job.model_validate(await context.store.resume(record.id))


CAUSE = "Redis takes no writes: its disk is full or cannot be written; everything waits, and goes on when there is space again"


def writes_refused(persistence: Mapping[str, Any]) -> bool:
    """Whether the last write to the append-only file failed, by INFO: then Redis refuses every command that writes."""
    return str(persistence.get("aof_last_write_status", "ok")) != "ok"


async def with_cause(redis: Redis, record: JobRecord) -> JobRecord:
    """The record; if it has no cause and a learner has the job, with what holds it up: a Redis that takes no writes, engines that load."""
    if record.cause or record.state not in LIVE:
        return record
    if writes_refused(await redis.info("persistence")):
        return replace(record, cause=CAUSE)
    return record if record.step else replace(record, cause=loading(record.id, await live_workers(redis)))


def loading(job_id: str, workers: Iterable[WorkerStatus]) -> str:
    """Which rollout servers load the job's engine, while none is ready; empty otherwise."""
    servers = [each for each in workers if each.kind is WorkerKind.ROLLOUT and each.job_id == job_id]
    if not all(server.state == "loading" for server in servers):
        return ""
    return f"the engine loads on {', '.join(server.name for server in servers)}" if servers else ""
