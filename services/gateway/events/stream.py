"""Stream of a job's events to one reader: server-sent events.

id, event: kind, data: {"at": …, …} ──► after the job's end: event: end
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from typing import Any

from redis.exceptions import RedisError
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.types import Receive, Scope, Send

from services.common.jobs.record import JobRecord
from services.gateway.events.hub import BEGINNING, EventHub, EventId
from services.gateway.middleware.streams import StreamPermit

log = logging.getLogger(__name__)

ARCHIVED = "this job ended long ago, and its events were removed: its record, history and ledger are there"
EVENT_ID_PATTERN = r"^[0-9]{1,19}-[0-9]{1,19}$"
"""Numbers of Redis end below 2⁶⁴, which has 20 digits: 19 digits always fit."""
EVENT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "description": "One event; `data` is a JSON object with `at` (Unix seconds) and what the kind tells.",
    "properties": {"id": {"type": "string"}, "event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["event", "data"],
}
SEND_TIMEOUT_S = 30.0
"""A reader that receives nothing for so long is disconnected."""


class EventStream(EventSourceResponse):
    """The answer; it releases its permit however it ends."""

    def __init__(self, events: AsyncIterator[bytes], permit: StreamPermit, *, heartbeat_s: float) -> None:
        """`heartbeat_s`: seconds between two comments."""
        super().__init__(events, ping=heartbeat_s, send_timeout=SEND_TIMEOUT_S)
        self._permit = permit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the stream."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._permit.release()


async def follow(hub: EventHub, record: JobRecord, last_id: EventId, permit: StreamPermit) -> AsyncIterator[bytes]:
    """Events after an id, until the job has ended and all events were sent.

    A failure of Redis ends the stream, and so does the loss of its permit: the client resumes by id.
    """
    with hub.feed(record.id) as feed:
        permit.on_loss = feed.notify
        try:
            while not (permit.lost or feed.failed):
                changed, over = feed.changed, feed.over or record.state.ended
                page = feed.after(last_id)
                if page is None:
                    page = await hub.page(record.id, last_id)
                for event_id, event in page:
                    last_id = event_id
                    yield event
                if page:
                    continue
                if over:
                    if last_id == BEGINNING and record.state.ended:  # every other job has events
                        content = {"at": record.finished_at, "message": ARCHIVED}
                        yield ServerSentEvent(event="archived", data=json.dumps(content)).encode()
                    state = feed.state if feed.over else record.state
                    yield ServerSentEvent(event="end", data=json.dumps({"state": state})).encode()
                    return
                await changed.wait()
        except RedisError as error:
            log.warning("an event stream of job %s broke off: %s", record.id, type(error).__name__)
