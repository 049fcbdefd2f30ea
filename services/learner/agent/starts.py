"""Start of a job: the number of its ranks' starts without a step, and its waits, reported as its cause."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

from services.common.errors import JobConflict
from services.common.jobs.record import JobRecord, JobState
from services.common.jobs.store import JobStore

STARTS_FILE = "starts.json"
"""Counts starts in the job's folder, so that the count goes on when the agent dies with its ranks."""
MAX_STARTS = 8
"""Starts of a job's ranks without a step, over all agents; one agent alone gives up earlier."""
FIRST_REPORT_S = 10.0
"""A wait is reported after this time, and again each time that it has doubled."""


def count_start(folder: Path, step: int) -> int:
    """Records another start at this step; returns the number of starts at this step, this one included."""
    path = folder / STARTS_FILE
    try:
        known = json.loads(path.read_text())
        starts = int(known["starts"]) + 1 if known["step"] == step else 1
    except (OSError, ValueError, KeyError, TypeError):
        starts = 1
    with contextlib.suppress(OSError):  # a full disk does not prevent a start
        path.write_text(json.dumps({"step": step, "starts": starts}))
    return starts


def forget_starts(folder: Path) -> None:
    """Resets the count: the ranks were stopped in good order, or a user paused the job."""
    (folder / STARTS_FILE).unlink(missing_ok=True)


class NamedWait:
    """One wait of a starting job; call `report` about once a second. Does nothing for a job in another state."""

    def __init__(self, store: JobStore, record: JobRecord, what: str) -> None:
        """The wait begins now. `what`: its description for users."""
        self._store, self._record, self._what = store, record, what
        self._since = time.monotonic()
        self._next_s = FIRST_REPORT_S
        self._starting = record.state is JobState.STARTING
        self._cancelled_at: float | None = None

    @property
    def cancelled_s(self) -> float:
        """Seconds since the cancel of a job that still starts was seen; 0 without one."""
        return time.monotonic() - self._cancelled_at if self._starting and self._cancelled_at is not None else 0.0

    async def report(self) -> None:
        """Reports the wait when it is due."""
        if not self._starting:
            return
        record = await self._store.find(self._record.id) or self._record
        self._starting = record.state is JobState.STARTING
        if record.cancel_requested and self._cancelled_at is None:
            self._cancelled_at = time.monotonic()
        waited_s = time.monotonic() - self._since
        if self._starting and waited_s >= self._next_s:
            self._next_s *= 2
            await report_cause(self._store, record, f"{self._what}, for {waited_s:.0f} s")


async def report_cause(store: JobStore, record: JobRecord, cause: str) -> None:
    """Sets the cause of a starting job; does nothing if the job has left that state meanwhile."""
    started = {} if record.started_at is None else {"started_at": record.started_at}
    with contextlib.suppress(JobConflict):
        await store.transition(record.id, JobState.STARTING, allowed=[JobState.STARTING], cause=cause, **started)
