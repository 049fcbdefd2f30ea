"""Counts time while it passes: a wait of an hour shows in its counter from the first second on, not after the hour."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import Counter


class Stopwatch:
    """Adds a phase's seconds to its counter; one phase at a time. `tick` is called every now and then by whoever has a clock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """In no phase."""
        self._clock = clock
        self._counter: Counter | None = None
        self._counted_to = 0.0

    @contextmanager
    def phase(self, counter: Counter) -> Iterator[None]:
        """What runs within it takes its time from this counter's phase."""
        self._counter, self._counted_to = counter, self._clock()
        try:
            yield
        finally:
            self.tick()
            self._counter = None

    def tick(self) -> None:
        """Counts what has passed since the last look."""
        now = self._clock()
        if self._counter is not None:
            self._counter.inc(now - self._counted_to)
        self._counted_to = now
