"""Named waits: what a job that starts waits for, as its cause, from the moment on at which it takes longer than usual."""

from __future__ import annotations

import contextlib
import time

from services.common.errors import JobConflict
from services.common.jobs.record import JobRecord, JobState
from services.common.jobs.store import JobStore

FIRST_S = 10.0
"""After this the wait is told for the first time, and then each time that it has doubled."""


class NamedWait:
    """One wait of a job that starts; call `say` about once a second. For a job that does not start it does nothing."""

    def __init__(self, store: JobStore, record: JobRecord, what: str) -> None:
        """Begins now. `what` the wait is for, for people."""
        self._store, self._record, self._what = store, record, what
        self._since = time.monotonic()
        self._next_s = FIRST_S
        self._starts = record.state is JobState.STARTING
        self._cancelled_at: float | None = None

    @property
    def cancelled_s(self) -> float:
        """Seconds since the job was seen to be cancelled, while it still starts; 0 when it is not."""
        return time.monotonic() - self._cancelled_at if self._starts and self._cancelled_at is not None else 0.0

    async def say(self) -> None:
        """Tells of the wait if it is time to."""
        if not self._starts:
            return
        record = await self._store.find(self._record.id) or self._record
        self._starts = record.state is JobState.STARTING
        if record.cancel_requested and self._cancelled_at is None:
            self._cancelled_at = time.monotonic()
        waited_s = time.monotonic() - self._since
        if self._starts and waited_s >= self._next_s:
            self._next_s *= 2
            await say(self._store, record, f"{self._what}, for {waited_s:.0f} s")


async def say(store: JobStore, record: JobRecord, cause: str) -> None:
    """Makes it the cause of a job that starts; of one that has gone on meanwhile, nothing."""
    started = {} if record.started_at is None else {"started_at": record.started_at}
    with contextlib.suppress(JobConflict):
        await store.transition(record.id, JobState.STARTING, allowed=[JobState.STARTING], cause=cause, **started)
