"""Occupancy of the rollout servers, from the groups that arrive: how long they had work, and how long a group took. Without I/O.

A group says how long its sampling took; it ended `judge_s` before its entry was written to the scored stream. The union of these intervals
is the time in which a server had at least one group. Both ends are of Redis's clock (an entry's id begins with its milliseconds), so
neither a late read nor another host's clock changes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from services.common.streams.consumer import Entry
from services.common.streams.types import ScoredGroup

MAX_SPANS = 64
"""Spans of busy time that are kept of a server; a group that began before the oldest of them counts from there on."""


@dataclass(frozen=True, slots=True)
class Occupied:
    """Figures of an interval, of the groups that arrived in it."""

    servers: int
    """Servers that sent a group."""
    busy_s: float
    """Seconds in which a server had at least one group, summed over the servers."""
    sampled: int
    """Groups that were sampled, held-out ones included."""
    generate_s: float
    """Their seconds from start to last token, summed."""


@dataclass(slots=True)
class Occupancy:
    """Occupancy since the last `take`."""

    _spans: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """Server → its spans of busy time, in order, apart from each other; unix seconds."""
    _servers: set[str] = field(default_factory=set)
    _busy_s: float = 0.0
    _sampled: int = 0
    _generate_s: float = 0.0

    def note(self, scored: ScoredGroup, entry: Entry) -> None:
        """Counts a group that arrived; one that failed took no time that counts."""
        group = scored.group
        if group.failure is not None:
            return
        end = int(entry.id.partition("-")[0]) / 1000 - scored.judge_s
        self._servers.add(group.server)
        self._busy_s += _cover(self._spans.setdefault(group.server, []), end - group.generate_s, end)
        self._sampled += 1
        self._generate_s += group.generate_s

    def take(self) -> Occupied:
        """The figures since the last call."""
        taken = Occupied(len(self._servers), self._busy_s, self._sampled, self._generate_s)
        self._servers, self._busy_s, self._sampled, self._generate_s = set(), 0.0, 0, 0.0
        return taken


def _cover(spans: list[tuple[float, float]], start: float, end: float) -> float:
    """Adds an interval to the spans; returns the seconds of it that none of them had."""
    if len(spans) == MAX_SPANS:
        start, end = max(start, spans[0][0]), max(end, spans[0][0])
    before = [span for span in spans if span[1] < start]
    after = [span for span in spans if span[0] > end]
    merged = spans[len(before) : len(spans) - len(after)]
    known_s = sum(min(end, span[1]) - max(start, span[0]) for span in merged)
    whole = (min([start, *(span[0] for span in merged)]), max([end, *(span[1] for span in merged)]))
    spans[:] = [*before, whole, *after][-MAX_SPANS:]
    return end - start - known_s
