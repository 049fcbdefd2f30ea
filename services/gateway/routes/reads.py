"""Reads of a job: its history, its samples and its events."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Query, Request, Response
from sse_starlette import EventSourceResponse

from services.common.jobs.retention import is_archived
from services.common.streams.types import Purpose
from services.gateway.dependencies import GUARDS, ContextDep, RecordDep
from services.gateway.errors import SpecRefused, documented, error_answer
from services.gateway.events.hub import BEGINNING, parse_id
from services.gateway.events.stream import EVENT_ID_PATTERN, EVENT_SCHEMA, EventStream, follow
from services.gateway.history import read_history, read_samples
from services.gateway.samples import SampleFilter, readable, token_ids
from services.gateway.schemas import History, Samples

MAX_RAW = 50
"""Groups of one answer with raw texts."""

router = APIRouter(prefix="/jobs/{job_id}", tags=["jobs"], responses=documented(404, 422), dependencies=GUARDS)


@router.get("/metrics", operation_id="job_metrics", summary="A job's history")
async def job_metrics(
    context: ContextDep,
    record: RecordDep,
    first: Annotated[
        int | None,
        Query(
            alias="from", ge=1, le=10_000_000, description="First step to return; without it, the newest.", examples=[1]
        ),
    ] = None,
    limit: Annotated[int, Query(ge=1, le=10_000, description="Most steps to return.", examples=[100])] = 1000,
) -> History:
    """One object per optimizer step, and the held-out evaluations."""
    return await read_history(context, record, first, limit)


@router.get("/rollouts", operation_id="job_rollouts", summary="A job's newest samples")
async def job_rollouts(
    context: ContextDep,
    record: RecordDep,
    limit: Annotated[int, Query(ge=1, le=500, description="Most groups to return.", examples=[5])] = 20,
    purpose: Annotated[Purpose | None, Query(description="Groups of this purpose only.", examples=["train"])] = None,
    group: Annotated[int | None, Query(ge=0, le=2**63 - 1, description="This group only.", examples=[17])] = None,
    wrong: Annotated[
        bool, Query(description="Only rollouts that were judged less than right.", examples=[True])
    ] = False,
    failed: Annotated[
        bool, Query(description="Only rollouts whose check failed: they have no reward.", examples=[False])
    ] = False,
    truncated: Annotated[
        bool, Query(description="Only rollouts that a length limit cut off.", examples=[False])
    ] = False,
    grep: Annotated[
        str,
        Query(
            max_length=1000,
            description="Only rollouts with this text, in any case; of an episode also in what the environment said.",
            examples=["boxed"],
        ),
    ] = "",
    step: Annotated[
        int | None,
        Query(ge=0, le=2**63 - 1, description="Only groups sampled by the policy of this step.", examples=[40]),
    ] = None,
    raw: Annotated[
        bool,
        Query(
            description="With prompts and completions as the model sees them, special tokens included.",
            examples=[False],
        ),
    ] = False,
) -> Samples:
    """The newest judged groups with their text, rewards and policy versions, and, before them, those of every k-th step.

    A rollout that took turns with an environment has its `turns`.

    With a filter, the newest groups that have such a rollout, each with such rollouts only.
    """
    if raw and limit > MAX_RAW:
        raise SpecRefused(f"raw texts are made of at most {MAX_RAW} groups at once", field="limit")
    wanted = SampleFilter(purpose, group, step, wrong, failed, truncated, grep)
    found = await read_samples(context, record, wanted, limit)
    texts = await context.admission.raw_texts(record.spec, token_ids(found)) if raw else None
    archived = await is_archived(context.redis, record)
    return Samples(archived=archived, samples=[*readable(found, texts)])


@router.get(
    "/events",
    operation_id="job_events",
    summary="A job's events, as they happen",
    response_class=EventSourceResponse,
    responses={
        200: {
            "description": "Server-sent events: `id`, `event` (state, step, eval, …) and `data` (JSON). "
            "The stream closes after `event: end` once the job has ended.",
            "content": {"text/event-stream": {"schema": EVENT_SCHEMA}},
        },
        204: {"description": "The job has ended and everything was sent before: do not reconnect."},
    },
)
async def job_events(
    context: ContextDep,
    request: Request,
    record: RecordDep,
    last_event_id: Annotated[
        str | None,
        Header(
            alias="Last-Event-ID",
            pattern=EVENT_ID_PATTERN,
            description="Go on after this event; browsers send it when they reconnect.",
            examples=["1760000000000-0"],
        ),
    ] = None,
) -> Response:
    """Everything that has happened to the job and then, as it happens, the rest. Heartbeats are comments."""
    after = BEGINNING if last_event_id is None else parse_id(last_event_id)
    if last_event_id is not None and record.state.ended and not await context.hub.page(record.id, after, count=1):
        return Response(status_code=204)
    permit = context.streams.acquire(request.client.host if request.client else "")
    if permit is None:
        message = f"all {context.streams.permits} event streams (MILLRACE_MAX_EVENT_STREAMS) are open: try again"
        return error_answer(429, message)
    events = follow(context.hub, record, after, permit)
    return EventStream(events, permit, heartbeat_s=context.event_times.heartbeat_s)
