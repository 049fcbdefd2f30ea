"""Dependencies of the routes: the parts of the gateway, and the job that a path names."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, cast

from fastapi import Depends, Path, Request
from fastapi.dependencies.utils import get_flat_dependant
from fastapi.security import HTTPBearer
from redis.asyncio import Redis
from starlette.exceptions import HTTPException

from services.common.config.settings import Settings
from services.common.errors import Problem, did_you_mean
from services.common.jobs.record import JobRecord
from services.common.jobs.restore import Restorer
from services.common.jobs.retention import Retention
from services.common.jobs.store import JobStore
from services.gateway.admission.admission import Admission
from services.gateway.errors import SpecRefused, clipped, is_for_other_methods
from services.gateway.events.hub import EventHub
from services.gateway.fetches import JobFetches
from services.gateway.metrics import JOB_ID, GatewayMetrics
from services.gateway.middleware.streams import StreamLimit
from services.gateway.openai.client import InferenceClient
from services.gateway.schemas import EXAMPLE_JOB_ID, JOB_ID_PATTERN

BEARER = Depends(
    HTTPBearer(auto_error=False, description="The gateway's token; `<home>/gateway.token` holds a generated one.")
)
"""Only documents the token in the OpenAPI: BearerAuth checks it."""


def _refuse_unknown_parameters(request: Request) -> None:
    """Raises SpecRefused for query parameters that the route does not have: a misspelt filter would select everything."""
    known = {parameter.alias for parameter in get_flat_dependant(request.scope["route"].dependant).query_params}
    unknown = [name for name in dict(request.query_params) if name not in known]
    if unknown and is_for_other_methods(request):
        raise HTTPException(405)
    if unknown:
        raise SpecRefused(
            *(Problem(name, f"is no parameter of this path{did_you_mean(name, known)}") for name in unknown)
        )


GUARDS = [BEARER, Depends(_refuse_unknown_parameters)]
"""Dependencies of every route of the job API."""

MAX_NAMED = 5
"""Ids that an ambiguous beginning is answered with."""


@dataclass(frozen=True, slots=True)
class EventTimes:
    """Intervals of event streams, seconds."""

    poll_s: float = 0.5
    """Between two polls of the followed jobs' events."""
    heartbeat_s: float = 15.0
    """Between two comments, which make proxies keep the connection."""


@dataclass(frozen=True, slots=True)
class Context:
    """The parts of one gateway."""

    redis: Redis
    store: JobStore
    restorer: Restorer
    retention: Retention
    admission: Admission
    fetches: JobFetches
    metrics: GatewayMetrics
    event_times: EventTimes
    hub: EventHub
    streams: StreamLimit
    inference: InferenceClient
    settings: Settings


def _context(request: Request) -> Context:
    return cast("Context", request.app.state.context)


ContextDep = Annotated[Context, Depends(_context)]


JobIdDep = Annotated[
    str,
    Path(
        description="The job's id, or where nothing is deleted a beginning that no other id has.",
        examples=[EXAMPLE_JOB_ID],
        json_schema_extra={"pattern": JOB_ID_PATTERN},
    ),
]
"""The id in the path. The pattern is documented, not enforced: every id that no job has is answered with 404."""


async def find_record(context: ContextDep, job_id: JobIdDep) -> JobRecord:
    """The job with this id, or with the only id that begins so. Raises HTTPException: 404, or 503 while its record is being restored."""
    if JOB_ID.fullmatch(job_id):
        record = await context.store.find(job_id)
        if record is not None:
            return record
        if await asyncio.to_thread(context.store.records.load, job_id) is not None:
            raise HTTPException(503, "Redis has lost the record of this job: it is being put back")
    matching = await context.store.ids_with_prefix(job_id)
    if len(matching) == 1 and (record := await context.store.find(matching[0])) is not None:
        return record
    raise HTTPException(404, _several(job_id, matching) if matching else "there is no such job")


def _several(prefix: str, ids: Sequence[str]) -> str:
    more = f" and {len(ids) - MAX_NAMED} others" if len(ids) > MAX_NAMED else ""
    return f"{clipped(prefix)} begins the ids of several jobs: {', '.join(ids[:MAX_NAMED])}{more}"


RecordDep = Annotated[JobRecord, Depends(find_record)]
"""The job that the path names."""
