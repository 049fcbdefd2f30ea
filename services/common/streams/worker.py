"""Stream worker: handles the entries of one stream of a job, many at once, and sends their results to the next stream.

    read    own pending ──► expired leases of others ──► new
    handle  entry ──► work ──► send: waits while the next stream is full; a drain leaves the entry pending, for other workers
              └── EntryError ──► dead letters, with the reason

Each entry is handled at least once; it takes effect on the next stream once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NoReturn

from prometheus_client import Counter

from services.common.errors import EntryError, StreamFull
from services.common.redis.connection import BLOCK_S
from services.common.redis.keys import Stage
from services.common.service.lifecycle import Drain
from services.common.streams.consumer import Consumer, Entry
from services.common.streams.stream import MAX_STREAM_LENGTH

log = logging.getLogger(__name__)

MAX_DELIVERIES = 5
"""An entry with more deliveries has crashed servers: it becomes a dead letter."""
FULL_RETRY_S = 0.25
"""Pause before a retry to add a group to a full stream."""

Handle = Callable[[Entry], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Limits of a worker."""

    entries: int
    """Entries handled at once."""
    read_count: int
    """Most entries of one read."""
    bound: int = MAX_STREAM_LENGTH
    """Most entries that the next stream may hold."""


@dataclass(frozen=True, slots=True)
class WorkerCounters:
    """Counters of a worker."""

    blocked_s: Counter
    """Seconds that finished work waited for a full next stream."""
    dead_letters: Counter
    idle_s: Counter | None = None
    """Seconds without any entry to handle."""


class StreamWorker:
    """Handler of one job's entries of one stream; `send` moves entries to the stream `onward`."""

    def __init__(
        self, consumer: Consumer, onward: Stage, limits: WorkerLimits, counters: WorkerCounters, drain: Drain
    ) -> None:
        self._consumer, self._onward = consumer, onward
        self._limits, self._counters, self._drain = limits, counters, drain
        self._handling: set[asyncio.Task[None]] = set()

    @property
    def in_flight(self) -> int:
        """Entries being handled."""
        return sum(not task.done() for task in self._handling)

    async def run(self, handle: Handle) -> None:
        """Handles entries.

        Consumes:     the stream.
        Waits for:    entries, while fewer than `limits.entries` are handled.
        Unblocked by: the producers of the stream.
        Produces:     entries of the next stream, and dead letters. Returns on drain, when all entries in flight are done; when it is
                      cancelled, the entries in flight stay pending, for other workers.

        Raises:
            Exception: the first error of `handle`, other than EntryError.
        """
        renewing = asyncio.create_task(self._consumer.keep_renewing(), name="renew")
        try:
            while not self._drain.requested:
                await self._read(handle)
                self._reap(renewing)
            if self._handling:
                await asyncio.wait(self._handling)
            self._reap(renewing)
        finally:
            for task in (renewing, *self._handling):
                task.cancel()
            await asyncio.gather(renewing, *self._handling, return_exceptions=True)

    async def send(self, entry: Entry, payload: bytes) -> bool | None:
        """Moves an entry to the next stream, as `payload`.

        True when it was moved; False when it was moved before, or another worker has claimed it; None when the drain came while the
        stream was full: the entry stays pending.
        """
        while True:
            try:
                return await self._consumer.hop(entry, self._onward, payload, bound=self._limits.bound)
            except StreamFull:
                self._counters.blocked_s.inc(FULL_RETRY_S)
                if await self._drain.wait(FULL_RETRY_S):
                    return None

    async def drop(self, entry: Entry) -> None:
        """Acks an entry without a result."""
        await self._consumer.ack(entry)

    async def reject(self, entry: Entry, payload: bytes, reason: str) -> NoReturn:
        """Makes a dead letter of an entry that has crashed servers. First `payload` reports it, so that its group gets its fate at once.

        Raises:
            EntryError: always, with the reason.
        """
        with contextlib.suppress(StreamFull):  # the learner's deadline ends the group then
            await self._consumer.announce(entry, self._onward, payload, bound=self._limits.bound)
        raise EntryError(reason)

    async def _read(self, handle: Handle) -> None:
        """Starts to handle as many entries as there are free places, or waits for a free place."""
        places = self._limits.entries - len(self._handling)
        if places <= 0:
            await asyncio.wait(self._handling, return_when=asyncio.FIRST_COMPLETED, timeout=BLOCK_S)
            return
        idle, began = not self._handling, time.monotonic()
        entries = await self._consumer.read(min(self._limits.read_count, places), BLOCK_S)
        if idle and self._counters.idle_s is not None:
            self._counters.idle_s.inc(time.monotonic() - began)
        for entry in entries:
            self._handling.add(asyncio.create_task(self._handle(handle, entry), name=f"group {entry.member}"))

    async def _handle(self, handle: Handle, entry: Entry) -> None:
        try:
            await handle(entry)
        except EntryError as error:
            log.warning("entry %s (%s) is put aside: %s", entry.id, entry.member, error)
            await self._consumer.dead_letter(entry, str(error))
            self._counters.dead_letters.inc()

    def _reap(self, renewing: asyncio.Task[None]) -> None:
        """Drops finished tasks, and raises the first error of one of them."""
        for task in [renewing, *self._handling]:
            if task.done() and not task.cancelled():
                self._handling.discard(task)
                task.result()
