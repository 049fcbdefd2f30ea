"""A job's events as server-sent events.

    millrace:{job}:events ── read from the last id ──► id, event: kind, data: {"at": …, …} ──► after the job's end: event: end

Polled rather than blocked on: a connection to Redis per reader would be dearer than half a second.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

from redis.exceptions import RedisError
from sse_starlette import ServerSentEvent

from services.common import keys
from services.common.connection import text
from services.common.job_records import JobRecord
from services.gateway.context import Context

log = logging.getLogger(__name__)

BEGINNING = "0-0"
EVENT_ID_PATTERN = r"^[0-9]{1,19}-[0-9]{1,19}$"
"""Redis counts to 2⁶⁴, which has 20 digits: ids of 19 always fit."""
EVENT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "description": "One event; `data` is a JSON object with `at` (Unix seconds) and what the kind tells.",
    "properties": {"id": {"type": "string"}, "event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["event", "data"],
}
_PAGE = 200


async def follow(context: Context, job_id: str, after: str) -> AsyncIterator[ServerSentEvent]:
    """Events after an id, until the job has ended and all were sent; a lost Redis ends the stream, and the client resumes by id."""
    context.metrics.streams.inc()
    try:
        while True:
            record = await context.store.find(job_id)  # before the read: what an ended job told is then all there
            page = await _read(context, job_id, after)
            for event_id, event in page:
                after = event_id
                yield event
            if page:
                continue
            if record is None or record.state.ended:
                yield ServerSentEvent(event="end", data=json.dumps({"state": record.state if record else None}))
                return
            await asyncio.sleep(context.event_times.poll_s)
    except RedisError as error:
        log.warning("an event stream of job %s broke off: %s", job_id, type(error).__name__)
    finally:
        context.metrics.streams.dec()


async def is_over(context: Context, record: JobRecord, after: str) -> bool:
    """Whether the job has ended and nothing came after this event."""
    return record.state.ended and not await _read(context, record.id, after)


async def _read(context: Context, job_id: str, after: str) -> list[tuple[str, ServerSentEvent]]:
    reply = await context.redis.xrange(keys.events(job_id), min=f"({after}", count=_PAGE)
    return [(text(event_id), _event(text(event_id), fields)) for event_id, fields in reply or []]


def _event(event_id: str, fields: Any) -> ServerSentEvent:  # noqa: ANN401  redis-py types replies too widely
    milliseconds = int(event_id.partition("-")[0])  # Redis's own clock stands in for an event without a time
    try:
        data: dict[str, Any] = {"at": float(fields.get(b"at", milliseconds / 1000))}
        told = json.loads(fields.get(b"d", b"{}"), parse_constant=lambda _: None)
        data |= told if isinstance(told, dict) else {"value": told}
    except ValueError:
        data = {"at": milliseconds / 1000, "message": "this event cannot be read"}
    kind = bytes(fields.get(b"kind", b"event")).decode(errors="replace")
    return ServerSentEvent(id=event_id, event=kind, data=json.dumps(data))
