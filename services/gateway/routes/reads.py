"""Reads of a job: its history, its samples and its events."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from sse_starlette import EventSourceResponse

from services.common.jobs.folder import JobFolder
from services.common.jobs.retention import is_archived
from services.common.redis import keys
from services.gateway.dependencies import BEARER, ContextDep, RecordDep
from services.gateway.errors import documented, error_answer
from services.gateway.events.hub import BEGINNING, parse_id
from services.gateway.events.stream import EVENT_ID_PATTERN, EVENT_SCHEMA, EventStream, follow
from services.gateway.schemas import History, OpenObject, Samples

log = logging.getLogger(__name__)
router = APIRouter(prefix="/jobs/{job_id}", tags=["jobs"], responses=documented(404, 422), dependencies=[BEARER])

MAX_EVALS = 1000
CHUNK = 1000


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
    if await is_archived(context.redis, record):
        return await asyncio.to_thread(_from_folder, context.settings.job_dir(record.id), first, limit)
    name = keys.steps(record.id)
    total = int(await context.redis.llen(name))
    evals = _objects(await context.redis.lrange(keys.evals(record.id), -MAX_EVALS, -1))
    if first is None:
        return History(total=total, steps=_objects(await context.redis.lrange(name, -limit, -1)), evals=evals)
    steps: list[OpenObject] = []
    position = first - 1  # step n is at index n - 1, or further on when steps were repeated after a rollback
    while len(steps) < limit and position < total:
        chunk = _objects(await context.redis.lrange(name, position, position + CHUNK - 1))
        steps += [item for item in chunk if _step(item) >= first]
        position += CHUNK
    return History(total=total, steps=steps[:limit], evals=evals)


@router.get("/rollouts", operation_id="job_rollouts", summary="A job's newest samples")
async def job_rollouts(
    context: ContextDep,
    record: RecordDep,
    limit: Annotated[int, Query(ge=1, le=500, description="Most groups to return.", examples=[5])] = 20,
) -> Samples:
    """The newest judged groups with their text, rewards and policy versions."""
    archived = await is_archived(context.redis, record)
    samples = _objects(await context.redis.lrange(keys.samples(record.id), 0, limit - 1))
    return Samples(archived=archived, samples=samples)


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


def _from_folder(folder: Path, first: int | None, limit: int) -> History:
    """History of a job whose data in Redis is gone."""
    history = JobFolder(folder).history()
    steps = _objects([json.dumps(step) for step in history.steps])
    page = steps[-limit:] if first is None else [item for item in steps if _step(item) >= first][:limit]
    evals = _objects([json.dumps(record) for record in history.evals[-MAX_EVALS:]])
    return History(total=len(steps), steps=page, evals=evals)


def _objects(raw: list[Any]) -> list[OpenObject]:
    """The JSON objects in a list's elements; numbers that JSON lacks (NaN) become null."""
    found = []
    for element in raw:
        try:
            value = json.loads(element, parse_constant=lambda _: None)
        except ValueError:
            value = None
        if isinstance(value, dict):
            found.append(value)
        else:
            log.warning("an element of a job's history is not a JSON object; it is left out")
    return found


def _step(item: OpenObject) -> float:
    """The record's step; infinity without one, so that no filter hides it."""
    step = item.get("step")
    return step if isinstance(step, int | float) else float("inf")
