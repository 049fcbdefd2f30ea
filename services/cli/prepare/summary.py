"""Summary of a preparation: counts, lengths, and what was not taken and why."""

from __future__ import annotations

from collections import Counter
from typing import Any

QUANTILES = (("median", 0.5), ("p95", 0.95), ("max", 1.0))
MAX_EXAMPLES = 3
"""Rows that the summary names for each reason; the file of rejected rows names all."""
BROKEN, OVERLONG, DUPLICATE = "broken", "overlong", "duplicate"
REASONS = (BROKEN, OVERLONG, DUPLICATE)


class Summary:
    """Counts of one preparation. Its memory grows with the number of different lengths and data sources only."""

    def __init__(self, unit: str) -> None:
        """`unit` of the lengths: tokens or characters."""
        self.rows = 0
        """Rows that were read."""
        self._unit = unit
        self._taken: Counter[str] = Counter()
        self._rejected: Counter[str] = Counter()
        self._examples: dict[str, list[str]] = {reason: [] for reason in REASONS}
        self._sources: Counter[str] = Counter()
        self._lengths: Counter[int] = Counter()
        self._other_answers = 0

    @property
    def taken(self) -> int:
        """Rows that became tasks."""
        return self._taken.total()

    def take(self, split: str, data_source: str, length: int) -> None:
        """Counts a task."""
        self._taken[split] += 1
        self._sources[data_source] += 1
        self._lengths[length] += 1

    def reject(self, file: str, number: int, reason: str, detail: str) -> None:
        """Counts a row that was not taken."""
        self._rejected[reason] += 1
        if len(self._examples[reason]) < MAX_EXAMPLES:
            self._examples[reason].append(f"{file}: row {number}: {detail}")

    def count_other_answer(self) -> None:
        """Counts a duplicate with another reference answer than the first."""
        self._other_answers += 1

    def first_reason(self) -> str:
        """The first row that was not taken, and why."""
        return next((found[0] for found in self._examples.values() if found), "the input has no rows")

    def as_record(self) -> dict[str, Any]:
        """The summary as JSON values."""
        return {
            "rows": self.rows,
            "taken": dict(sorted(self._taken.items())),
            "rejected": {reason: self._rejected[reason] for reason in REASONS},
            "duplicates_with_another_answer": self._other_answers,
            "data_sources": dict(sorted(self._sources.items())),
            f"prompt_{self._unit}": self._quantiles(),
            "examples": {reason: found for reason, found in self._examples.items() if found},
        }

    def _quantiles(self) -> dict[str, float]:
        lengths, count = sorted(self._lengths), self.taken
        if not count:
            return {}
        found: dict[str, float] = {"min": lengths[0]}
        found["mean"] = round(sum(length * times for length, times in self._lengths.items()) / count, 1)
        for name, share in QUANTILES:
            below = 0
            for length in lengths:
                below += self._lengths[length]
                if below >= share * count:
                    found[name] = length
                    break
        return found
