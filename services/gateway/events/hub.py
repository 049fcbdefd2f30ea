"""Hub of all event streams: reads each followed job once, however many readers it has.

    Redis ── one poll of all followed jobs, twice a second ──► Feed of a job: its newest events ──► readers
      └───── pages of older events ───────────────────────────────────────────────────────────────►

A feed keeps a bounded number of events, and a reader keeps only the id of its last one. A reader that is slower than
its job, or that begins further back, reads pages from Redis until the feed has its next event: it delays no other
reader, and no event is buffered for it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError
from sse_starlette import ServerSentEvent

from services.common.jobs.record import JobState
from services.common.redis import keys
from services.common.redis.connection import text
from services.common.redis.pool import PoolBusyError

log = logging.getLogger(__name__)

EventId = tuple[int, int]
"""Milliseconds and sequence number, as in a stream id of Redis."""
Page = list[tuple[EventId, bytes]]
"""Ids of events, and the events as server-sent events."""

BEGINNING: EventId = (0, 0)
PAGE_SIZE = 200
FEED_SIZE = 256
"""Newest events of a job that its feed keeps."""
PAGES_AT_ONCE = 8
"""Readers that read old events at the same time: other requests are not starved."""
JOBS_AT_ONCE = 100
"""Jobs in one pipeline."""


@dataclass(eq=False, slots=True)
class Feed:
    """Newest events of one job, and its state."""

    job_id: str
    readers: int = 0
    kept_after: EventId | None = None
    """Every event after this id is kept; None before the first poll."""
    newest: EventId = BEGINNING
    """Id of the newest event."""
    state: JobState | None = None
    over: bool = False
    """Whether the job has ended, or is gone, and all its events were read."""
    failed: bool = False
    """Whether Redis could not be read: the streams end, and clients resume by id."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set at the next change, and then replaced. A reader takes it before it reads the feed, and so misses no change."""
    _events: deque[tuple[EventId, bytes]] = field(default_factory=deque)

    def after(self, event_id: EventId) -> Page | None:
        """The events after that id; None when they are not all kept here."""
        if self.kept_after is None or event_id < self.kept_after:
            return None
        newer = list(takewhile(lambda event: event[0] > event_id, reversed(self._events)))
        return newer[::-1]

    def begin(self, event_id: EventId) -> None:
        """Starts the feed at the first poll: events up to this id are in Redis only."""
        self.kept_after = self.newest = event_id
        self.notify()

    def extend(self, events: Page) -> None:
        """Adds newer events, and drops the oldest beyond the bound."""
        self._events.extend(events)
        self.newest = events[-1][0]
        while len(self._events) > FEED_SIZE:
            self.kept_after = self._events.popleft()[0]
        self.notify()

    def notify(self) -> None:
        """Wakes the readers."""
        self.changed.set()
        self.changed = asyncio.Event()


class EventHub:
    """Feeds of all followed jobs. It polls Redis while there are readers."""

    def __init__(self, redis: Redis, poll_s: float) -> None:
        """`poll_s`: seconds between two polls."""
        self._redis = redis
        self._poll_s = poll_s
        self._feeds: dict[str, Feed] = {}
        self._pages = asyncio.Semaphore(PAGES_AT_ONCE)
        self._poller: asyncio.Task[None] | None = None

    @contextmanager
    def feed(self, job_id: str) -> Iterator[Feed]:
        """The job's feed, for one reader."""
        feed = self._feeds.setdefault(job_id, Feed(job_id))
        feed.readers += 1
        if self._poller is None or self._poller.done():
            self._poller = asyncio.create_task(self._poll(), name="event hub")
        try:
            yield feed
        finally:
            feed.readers -= 1
            if not feed.readers:
                self._remove(feed)

    async def page(self, job_id: str, after: EventId, count: int = PAGE_SIZE) -> Page:
        """The next events after that id, from Redis."""
        async with self._pages:
            return _events(await self._redis.xrange(keys.events(job_id), min=_exclusive(after), count=count))

    async def _poll(self) -> None:
        """Consumes the followed jobs' events; waits for half a second; unblocked by time; produces changes of their feeds.

        It ends with the last reader, and when Redis fails: then all streams end, and the next reader starts it again.
        """
        try:
            while self._feeds:
                feeds, more = list(self._feeds.values()), False
                for first in range(0, len(feeds), JOBS_AT_ONCE):
                    more = await self._poll_feeds(feeds[first : first + JOBS_AT_ONCE]) or more
                await asyncio.sleep(0 if more else self._poll_s)
        except RedisError as error:
            log.warning("the event streams broke off: %s", type(error).__name__)
        finally:
            for feed in list(self._feeds.values()):
                self._fail(feed)

    async def _poll_feeds(self, feeds: Sequence[Feed]) -> bool:
        """Reads these jobs in one pipeline; whether there is more to read at once."""
        async with self._redis.pipeline(transaction=False) as pipe:
            for feed in feeds:
                # Before the events: those of an ended job are then complete.
                pipe.hget(keys.record(feed.job_id), "state")
                if feed.kept_after is None:
                    pipe.xrevrange(keys.events(feed.job_id), count=1)
                else:
                    pipe.xrange(keys.events(feed.job_id), min=_exclusive(feed.newest), count=PAGE_SIZE)
            try:
                replies = await pipe.execute(raise_on_error=False)
            except PoolBusyError:
                return False  # the next poll reads them
        full = [self._apply(*reply) for reply in zip(feeds, replies[::2], replies[1::2], strict=True)]
        return any(full)

    def _apply(self, feed: Feed, state: Any, events: Any) -> bool:  # noqa: ANN401
        """Applies the replies for one job; whether its events filled a page."""
        try:
            for reply in (state, events):
                if isinstance(reply, Exception):
                    raise reply
            feed.state, page = None if state is None else JobState(text(state)), _events(events)
        except (RedisError, ValueError) as error:  # of this job only
            log.error("the events of job %s cannot be read: %s", feed.job_id, error)  # noqa: TRY400  bad data, no fault of this code
            self._fail(feed)
            return False
        if feed.kept_after is None:
            feed.begin(page[0][0] if page else BEGINNING)
        elif page:
            feed.extend(page)
        if len(page) < PAGE_SIZE and (feed.state is None or feed.state.ended):
            feed.over = True
            self._remove(feed)
        return len(page) == PAGE_SIZE

    def _fail(self, feed: Feed) -> None:
        feed.failed = True
        self._remove(feed)

    def _remove(self, feed: Feed) -> None:
        """Polls it no more; its readers keep it. Another reader may have started a new feed of the job meanwhile."""
        if self._feeds.get(feed.job_id) is feed:
            del self._feeds[feed.job_id]
        feed.notify()


def parse_id(event_id: str) -> EventId:
    """`1760000000000-0` as numbers."""
    milliseconds, _, number = event_id.partition("-")
    return int(milliseconds), int(number)


def _exclusive(event_id: EventId) -> str:
    """The start of a range without that event, as XRANGE takes it."""
    return f"({event_id[0]}-{event_id[1]}"


def _events(reply: Any) -> Page:  # noqa: ANN401  redis-py's types are too wide
    return [(parse_id(text(event_id)), _encode(text(event_id), fields)) for event_id, fields in reply or []]


def _encode(event_id: str, fields: Any) -> bytes:  # noqa: ANN401
    """One server-sent event, the same for every reader."""
    milliseconds = parse_id(event_id)[0]  # Redis's clock is the default for an event without a time
    try:
        data: dict[str, Any] = {"at": float(fields.get(b"at", milliseconds / 1000))}
        content = json.loads(fields.get(b"d", b"{}"), parse_constant=lambda _: None)
        data |= content if isinstance(content, dict) else {"value": content}
    except (ValueError, RecursionError):
        data = {"at": milliseconds / 1000, "message": "this event cannot be read"}
    kind = bytes(fields.get(b"kind", b"event")).decode(errors="replace")
    return ServerSentEvent(id=event_id, event=kind, data=json.dumps(data)).encode()
