"""Dependencies of the routes: the parts of the gateway, and the job that a path names."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Annotated, cast

from fastapi import Depends, Path, Request
from fastapi.security import HTTPBearer
from redis.asyncio import Redis
from starlette.exceptions import HTTPException

from services.common.config.settings import Settings
from services.common.jobs.record import JobRecord
from services.common.jobs.restore import Restorer
from services.common.jobs.retention import Retention
from services.common.jobs.store import JobStore
from services.gateway.admission.admission import Admission
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
    str, Path(description="The job's id.", examples=[EXAMPLE_JOB_ID], json_schema_extra={"pattern": JOB_ID_PATTERN})
]
"""The id in the path. The pattern is documented, not enforced: every id that no job has is answered with 404."""


async def _record(context: ContextDep, job_id: JobIdDep) -> JobRecord:
    if JOB_ID.fullmatch(job_id):
        record = await context.store.find(job_id)
        if record is not None:
            return record
        if await asyncio.to_thread(context.store.records.load, job_id) is not None:
            raise HTTPException(503, "Redis has lost the record of this job: it is being put back")
    raise HTTPException(404, "there is no such job")


RecordDep = Annotated[JobRecord, Depends(_record)]
"""The job that the path names; 404 when there is none, 503 while Redis lacks a record that is being restored."""
