"""Turns of the learner on devices that it shares with rollout servers: who watches, and who samples nothing meanwhile.

begin ─► announcement ─► every server that watches pauses, and reports it ─► the learner computes ─► next version: the turn's end
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from services.common.weight_sync.store import WeightStore


class Turns:
    """Turns of one job; thread-safe."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store
        self._changed = threading.Condition()
        self._watching: Counter[str] = Counter()
        self._yielded: set[str] = set()

    @contextmanager
    def watching(self, server: str) -> Iterator[None]:
        """While a server watches; it is waited for in a turn."""
        with self._changed:
            self._watching[server] += 1
        try:
            yield
        finally:
            with self._changed:
                self._watching[server] -= 1
                if not self._watching[server]:
                    del self._watching[server]  # names come from outside
                self._changed.notify_all()

    def yielded(self, server: str) -> None:
        """A server samples nothing until the turn ends."""
        with self._changed:
            self._yielded.add(server)
            self._changed.notify_all()

    def begin(self, limit_s: float) -> list[str]:
        """Begins a turn, and waits for the servers; returns those that sample still after `limit_s` seconds."""
        end = time.monotonic() + limit_s
        with self._changed:
            self._yielded.clear()
            self._store.begin_turn()
            while (missing := self._missing()) and (left := end - time.monotonic()) > 0:
                self._changed.wait(left)
            return missing

    def _missing(self) -> list[str]:
        return sorted(server for server in self._watching if server not in self._yielded)
