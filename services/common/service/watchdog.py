"""A process ends itself when its event loop hangs, or when it was stopped for longer than its leases: nobody else may be there to do it.

A container that is unhealthy is not restarted by Docker; a process that ends is. And one that wakes up after others have taken over its
work must not go on with it.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable

from services.common.redis.fencing import LEASE_S

log = logging.getLogger(__name__)

BLOCKED_S = 120.0
"""An event loop that does not turn for so long hangs."""
STOPPED_S = LEASE_S
"""Whoever was stopped for longer begins anew: others have its work."""
EXIT_CODE = 70
_TICK_S = 1.0


class LoopGuard:
    """Watches the running event loop from a thread, from `start` to `stop`."""

    def __init__(
        self,
        blocked_s: float = BLOCKED_S,
        *,
        clock: Callable[[], float] = time.monotonic,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        """`clock`, `end`: for tests."""
        self._blocked_s, self._clock, self._end = blocked_s, clock, end
        self._turned = self._ticked = clock()
        self._over = threading.Event()

    def start(self) -> None:
        """Begins; call it in the loop."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, args=(loop,), name="loop-guard", daemon=True).start()

    def stop(self) -> None:
        """Watches no more."""
        self._over.set()

    def turn(self) -> None:
        """The loop turns."""
        self._turned = self._clock()

    def look(self) -> None:
        """Ends the process if it must."""
        now = self._clock()
        asleep_s, blocked_s, self._ticked = now - self._ticked, now - self._turned, now
        if asleep_s > STOPPED_S:
            log.critical("this process was stopped for %.0f s: its work is others' now, so it ends", asleep_s)
        elif blocked_s > self._blocked_s:
            log.critical("the event loop has not turned for %.0f s: the process ends", blocked_s)
            faulthandler.dump_traceback(sys.stderr)
        else:
            return
        self._end(EXIT_CODE)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._over.wait(_TICK_S):
            self.look()
            try:
                loop.call_soon_threadsafe(self.turn)
            except RuntimeError:  # the loop is closed
                return
