"""Whether a figure is flat: a robust line through what was seen after the warm-up, and how much it rises in an hour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

HOUR_S = 3600.0
SHARE = 0.03
"""A figure is flat that rises by less than this share of its level in an hour, or by less than what is allowed to its kind."""
ALLOWED = {
    "memory, MiB": 16.0, "used memory, MiB": 4.0, "shared memory, MiB": 16.0, "temporary files, MiB": 8.0, "disk, MiB": 64.0,
    "open files": 4.0, "threads": 4.0, "processes": 1.0, "keys": 20.0, "temporary files": 10.0,
}  # fmt: skip
"""By quantity: an hour's rise that is noise."""
LEAST_S = 1200.0
"""A slope over less time says nothing."""


@dataclass(frozen=True, slots=True)
class Trend:
    """One figure of one service over the time after the warm-up."""

    service: str
    quantity: str
    start: float
    """Median of the first tenth."""
    end: float
    """Median of the last tenth."""
    per_hour: float
    """The line's slope (Theil and Sen: the median of the slopes between all pairs)."""
    seconds: float

    @property
    def allowed(self) -> float:
        """The rise per hour up to which it is flat."""
        return max(ALLOWED[self.quantity], SHARE * abs(self.start))

    @property
    def flat(self) -> bool | None:
        """Whether it does not rise; None when it was not watched for long enough."""
        return None if self.seconds < LEAST_S else self.per_hour <= self.allowed

    @property
    def verdict(self) -> str:
        """A word for the table."""
        return {True: "flat", False: "**rises**", None: "too short to tell"}[self.flat]


def trend(service: str, quantity: str, times_s: Sequence[float], values: Sequence[float]) -> Trend:
    """The trend of what was seen at these times, oldest first.

    Raises:
        ValueError: fewer than two values.
    """
    if len(values) < 2:
        raise ValueError(f"{service}, {quantity}: {len(values)} values have no slope")
    times, seen = np.asarray(times_s, np.float64), np.asarray(values, np.float64)
    first, second = np.triu_indices(len(times), k=1)
    slopes = (seen[second] - seen[first]) / (times[second] - times[first])
    tenth = max(1, len(seen) // 10)
    start, end = float(np.median(seen[:tenth])), float(np.median(seen[-tenth:]))
    return Trend(service, quantity, start, end, float(np.median(slopes)) * HOUR_S, float(times[-1] - times[0]))


def table(trends: Sequence[Trend]) -> list[str]:
    """In Markdown."""
    lines = [
        "| service | quantity | start | end | slope per hour | flat up to | verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    for item in trends:
        numbers = f"{item.start:,.1f} | {item.end:,.1f} | {item.per_hour:+,.2f} | {item.allowed:,.1f}"
        lines.append(f"| {item.service} | {item.quantity} | {numbers} | {item.verdict} |")
    return lines
