"""Stream worker: handles one job's entries of one stream, many at once, and sends what comes of them to the next stream.

    read    own pending ──► left by others for longer than the lease ──► new
    handle  entry ──► work ──► send: waits while the next stream is full; a drain leaves the entry pending, for others
              └── EntryError ──► dead letters, with the reason

Each entry is handled at least once; its effect on the next stream happens once.
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
"""An entry delivered more often than this has brought servers down: it is put aside."""
FULL_RETRY_S = 0.25
"""Pause before a group is offered again to a stream that is full."""

Handle = Callable[[Entry], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """How much a worker takes on."""

    entries: int
    """Entries handled at once."""
    read_count: int
    """Most entries of one read."""
    bound: int = MAX_STREAM_LENGTH
    """Most entries that the next stream may hold."""


@dataclass(frozen=True, slots=True)
class WorkerCounters:
    """What a worker counts."""

    blocked_s: Counter
    """Seconds that finished work waited for room in the next stream."""
    dead_letters: Counter
    idle_s: Counter | None = None
    """Seconds without any entry to handle."""


class StreamWorker:
    """One job's entries of one stream; `run` until the drain, or cancelled."""

    def __init__(
        self, consumer: Consumer, onward: Stage, limits: WorkerLimits, counters: WorkerCounters, drain: Drain
    ) -> None:
        """Reads nothing yet; `onward` is the stream to which `send` moves entries."""
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
        Unblocked by: whoever fills the stream.
        Produces:     entries of the next stream, and dead letters. Returns on drain, when what it had taken is done; what is not
                      done when it is cancelled stays pending, for others.

        Raises:
            Exception: the first error of `handle`, other than EntryError.
        """
        renewing = asyncio.create_task(self._consumer.keep_renewing(), name="renew")
        try:
            while not self._drain.requested:
                await self._take(handle)
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

        True when it was moved; False when it was moved before, or is another's by now; None when the drain came while the stream
        was full: the entry stays pending.
        """
        while True:
            try:
                return await self._consumer.hop(entry, self._onward, payload, bound=self._limits.bound)
            except StreamFull:
                self._counters.blocked_s.inc(FULL_RETRY_S)
                if await self._drain.wait(FULL_RETRY_S):
                    return None

    async def drop(self, entry: Entry) -> None:
        """Lets an entry go: nothing comes of it."""
        await self._consumer.ack(entry)

    async def give_up(self, entry: Entry, payload: bytes, reason: str) -> NoReturn:
        """Ends an entry that has brought servers down: `payload`, which says so, goes on first, so that its group has its fate at once.

        Raises:
            EntryError: always, with the reason.
        """
        with contextlib.suppress(StreamFull):  # the learner's deadline ends the group then
            await self._consumer.announce(entry, self._onward, payload, bound=self._limits.bound)
        raise EntryError(reason)

    async def _take(self, handle: Handle) -> None:
        """Reads as many entries as there are places for, or waits for a place."""
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
        """One entry, from its delivery to what becomes of it."""
        try:
            await handle(entry)
        except EntryError as error:
            log.warning("entry %s (%s) is put aside: %s", entry.id, entry.member, error)
            await self._consumer.dead_letter(entry, str(error))
            self._counters.dead_letters.inc()

    def _reap(self, renewing: asyncio.Task[None]) -> None:
        """Lets finished tasks go, and raises what one of them raised."""
        for task in [renewing, *self._handling]:
            if task.done() and not task.cancelled():
                self._handling.discard(task)
                task.result()
