"""Follower of the active jobs: passes each change to a service that serves jobs, within half a second."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from services.common.jobs.record import ActiveJob
from services.common.jobs.store import JobStore
from services.common.redis.connection import redis_unavailable
from services.common.service.lifecycle import Drain

POLL_INTERVAL_S = 0.5
HUNG_AFTER_S = 60.0
"""Time without a poll, while Redis answers, after which the process counts as hung."""

Changed = Callable[[dict[str, ActiveJob]], Awaitable[None]]
"""Attaches to new jobs and detaches from the others; gets the jobs that are active now."""


class JobFollower:
    """Polls the active jobs until the drain, and reports its own health."""

    def __init__(self, store: JobStore, drain: Drain) -> None:
        self._store, self._drain = store, drain
        self._looked_at: float | None = None

    async def run(self, changed: Changed) -> None:
        """Follows the jobs.

        Consumes:     the active jobs, twice a second.
        Waits for:    the next poll.
        Unblocked by: time. Learners change the jobs: they activate and retire them.
        Produces:     calls of `changed`. Returns on drain.
        """
        while True:
            await changed(await self._store.active())
            self._looked_at = time.monotonic()
            if await self._drain.wait(POLL_INTERVAL_S):
                return

    def healthy(self) -> str | None:
        """Why the process should be restarted, or None."""
        if self._looked_at is None or self._drain.requested or redis_unavailable():
            return None
        late = time.monotonic() - self._looked_at > HUNG_AFTER_S
        return f"no look at the active jobs for {HUNG_AFTER_S:.0f} s" if late else None

    def ready(self) -> str | None:
        """Why the process takes no work, or None."""
        if self._drain.requested:
            return "draining"
        return "starting" if self._looked_at is None else None
