"""Hub of all event streams: looks at each followed job once, however many read it.

    Redis ── one look at all followed jobs, twice a second ──► Feed of a job: its newest events ──► readers
      └───── pages of older events ───────────────────────────────────────────────────────────────►

A feed keeps a bounded number of events, and a reader keeps only the id of its last one. A reader that is slower than
its job, or that begins further back, reads pages from Redis until the feed has what comes next: it delays nobody, and
nothing is kept for it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
"""Milliseconds and number, as Redis counts."""
Page = list[tuple[EventId, bytes]]
"""Events by their ids, as they go over the wire."""

BEGINNING: EventId = (0, 0)
PAGE = 200
KEPT = 256
"""Newest events of a job that its feed keeps."""
PAGES_AT_ONCE = 8
"""Readers that read old events at the same time: the others' requests get their turn."""
JOBS_AT_ONCE = 100
"""Jobs of one pipeline."""


class Feed:
    """One job's newest events, and what it has come to."""

    def __init__(self, job_id: str) -> None:
        """Knows nothing before the first look."""
        self.job_id = job_id
        self.readers = 0
        self.floor: EventId | None = None
        """Every event after this id is kept; None before the first look."""
        self.place: EventId = BEGINNING
        """Id of the newest event that was seen."""
        self.state: JobState | None = None
        self.over = False
        """Whether the job has ended, or is gone, and all its events were seen."""
        self.failed = False
        """Whether Redis could not be read: readers go, and come again by their ids."""
        self.changed = asyncio.Event()
        """Set at the next change; another one then takes its place. Take it before you look, and nothing is missed."""
        self._events: deque[tuple[EventId, bytes]] = deque()

    def after(self, place: EventId) -> Page | None:
        """The events after that id; None when they are not all kept here."""
        if self.floor is None or place < self.floor:
            return None
        newer: Page = []
        for event in reversed(self._events):
            if event[0] <= place:
                break
            newer.append(event)
        newer.reverse()
        return newer

    def begin(self, place: EventId) -> None:
        """The first look: events up to this id are in Redis only."""
        self.floor = self.place = place
        self.notify()

    def take(self, events: Page) -> None:
        """Keeps newer events, and drops the oldest where there are too many."""
        self._events.extend(events)
        self.place = events[-1][0]
        while len(self._events) > KEPT:
            self.floor = self._events.popleft()[0]
        self.notify()

    def notify(self) -> None:
        """Wakes the readers."""
        self.changed.set()
        self.changed = asyncio.Event()


class EventHub:
    """The feeds of all followed jobs. It looks while somebody reads."""

    def __init__(self, redis: Redis, poll_s: float) -> None:
        """`poll_s`: seconds between two looks."""
        self._redis = redis
        self._poll_s = poll_s
        self._feeds: dict[str, Feed] = {}
        self._pages = asyncio.Semaphore(PAGES_AT_ONCE)
        self._looking: asyncio.Task[None] | None = None

    @contextmanager
    def feed(self, job_id: str) -> Iterator[Feed]:
        """The job's feed, for one reader."""
        feed = self._feeds.setdefault(job_id, Feed(job_id))
        feed.readers += 1
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look(), name="event hub")
        try:
            yield feed
        finally:
            feed.readers -= 1
            if not feed.readers:
                self._forget(feed)

    async def page(self, job_id: str, after: EventId, count: int = PAGE) -> Page:
        """The next events after that id, from Redis."""
        async with self._pages:
            reply = await self._redis.xrange(keys.events(job_id), min=f"({_written(after)}", count=count)
            return _events(reply)

    async def _look(self) -> None:
        """Consumes the followed jobs' events; waits half a second; unblocked by time; produces changes of their feeds.

        It ends with the last reader, and with Redis: then the readers go, and whoever comes again starts it anew.
        """
        try:
            while self._feeds:
                feeds, more = list(self._feeds.values()), False
                for first in range(0, len(feeds), JOBS_AT_ONCE):
                    more = await self._look_at(feeds[first : first + JOBS_AT_ONCE]) or more
                await asyncio.sleep(0 if more else self._poll_s)
        except RedisError as error:
            log.warning("the event streams broke off: %s", type(error).__name__)
        finally:
            for feed in list(self._feeds.values()):
                self._fail(feed)

    async def _look_at(self, feeds: Sequence[Feed]) -> bool:
        """One pipeline; whether there is more to read at once."""
        async with self._redis.pipeline(transaction=False) as pipe:
            for feed in feeds:
                pipe.hget(
                    keys.record(feed.job_id), "state"
                )  # before the events: what an ended job told is then all there
                if feed.floor is None:
                    pipe.xrevrange(keys.events(feed.job_id), count=1)
                else:
                    pipe.xrange(keys.events(feed.job_id), min=f"({_written(feed.place)}", count=PAGE)
            try:
                replies = await pipe.execute(raise_on_error=False)
            except PoolBusyError:
                return False  # the next look will do
        full = [self._read(*found) for found in zip(feeds, replies[::2], replies[1::2], strict=True)]
        return any(full)

    def _read(self, feed: Feed, state: Any, events: Any) -> bool:  # noqa: ANN401
        """What one look at a job has found; whether its events filled a page."""
        try:
            for reply in (state, events):
                if isinstance(reply, Exception):
                    raise reply
            self._take(feed, None if state is None else JobState(text(state)), _events(events))
        except (RedisError, ValueError) as error:  # of this job only
            log.error("the events of job %s cannot be read: %s", feed.job_id, error)  # noqa: TRY400  no fault of this code
            self._fail(feed)
            return False
        return len(events) == PAGE

    def _take(self, feed: Feed, state: JobState | None, events: Page) -> None:
        if feed.floor is None:
            feed.begin(events[0][0] if events else BEGINNING)
        elif events:
            feed.take(events)
        feed.state = state
        if len(events) < PAGE and (state is None or state.ended):
            feed.over = True
            self._forget(feed)
            feed.notify()

    def _fail(self, feed: Feed) -> None:
        feed.failed = True
        self._forget(feed)
        feed.notify()

    def _forget(self, feed: Feed) -> None:
        """Looks at it no more; its readers keep it. Another reader may have begun a new one meanwhile."""
        if self._feeds.get(feed.job_id) is feed:
            del self._feeds[feed.job_id]


def parse_id(written: str) -> EventId:
    """`1760000000000-0` as numbers."""
    milliseconds, _, number = written.partition("-")
    return int(milliseconds), int(number)


def _written(event_id: EventId) -> str:
    return f"{event_id[0]}-{event_id[1]}"


def _events(reply: Any) -> Page:  # noqa: ANN401  redis-py types replies too widely
    return [(parse_id(text(event_id)), _encoded(text(event_id), fields)) for event_id, fields in reply or []]


def _encoded(event_id: str, fields: Any) -> bytes:  # noqa: ANN401
    """One event as it goes over the wire, to every reader the same."""
    milliseconds = int(event_id.partition("-")[0])  # Redis's own clock stands in for an event without a time
    try:
        data: dict[str, Any] = {"at": float(fields.get(b"at", milliseconds / 1000))}
        told = json.loads(fields.get(b"d", b"{}"), parse_constant=lambda _: None)
        data |= told if isinstance(told, dict) else {"value": told}
    except (ValueError, RecursionError):
        data = {"at": milliseconds / 1000, "message": "this event cannot be read"}
    kind = bytes(fields.get(b"kind", b"event")).decode(errors="replace")
    return ServerSentEvent(id=event_id, event=kind, data=json.dumps(data)).encode()
