"""Follower of the active jobs: whoever serves jobs learns of each change within half a second."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from services.common.jobs.record import ActiveJob
from services.common.jobs.store import JobStore
from services.common.redis.connection import redis_is_away
from services.common.service.lifecycle import Drain

POLL_INTERVAL_S = 0.5
BLOCKED_S = 60.0
"""Without a look at the active jobs for so long, while Redis answers, the process hangs."""

Changed = Callable[[dict[str, ActiveJob]], Awaitable[None]]
"""Attaches to and lets go of jobs, by what is active now."""


class JobFollower:
    """Looks at the active jobs, and says whether it still does."""

    def __init__(self, store: JobStore, drain: Drain) -> None:
        """Looks at nothing yet; `drain` ends `run`."""
        self._store, self._drain = store, drain
        self._looked_at: float | None = None

    async def run(self, changed: Changed) -> None:
        """Follows the jobs.

        Consumes:     the active jobs, twice a second.
        Waits for:    the next look.
        Unblocked by: time; the jobs change when learners activate or retire them.
        Produces:     calls of `changed`. Returns on drain.
        """
        while True:
            await changed(await self._store.active())
            self._looked_at = time.monotonic()
            if await self._drain.wait(POLL_INTERVAL_S):
                return

    def healthy(self) -> str | None:
        """Why the process should be restarted, or None."""
        if self._looked_at is None or self._drain.requested or redis_is_away():
            return None
        late = time.monotonic() - self._looked_at > BLOCKED_S
        return f"no look at the active jobs for {BLOCKED_S:.0f} s" if late else None

    def ready(self) -> str | None:
        """Why the process takes no work, or None."""
        if self._drain.requested:
            return "draining"
        return "starting" if self._looked_at is None else None
