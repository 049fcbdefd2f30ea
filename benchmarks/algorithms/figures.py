"""Figures of a job that has ended, from its history. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

LAST_STEPS = 10
"""Steps at the end that a final figure is the mean of."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one job did. Records and evaluations are those of `GET /jobs/{id}/metrics`."""

    state: str
    cause: str
    """Why it failed; empty when it did not."""
    steps: Sequence[Mapping[str, Any]]
    evals: Sequence[Mapping[str, Any]]

    @property
    def seconds(self) -> float | None:
        """From the request for the first batch to the end of the last step: without the engine's start and the evaluations around them."""
        if not self.steps:
            return None
        return float(self.steps[-1]["at"] - self.steps[0]["at"] + self.steps[0]["step_s"])

    @property
    def before(self) -> float | None:
        """Held-out accuracy (avg@k) before the first step."""
        return self._accuracy(0)

    @property
    def after(self) -> float | None:
        """The same after the last step; None unless the job succeeded."""
        return self._accuracy(-1) if self.state == "succeeded" and len(self.evals) > 1 else None

    @property
    def gain(self) -> float | None:
        """Their difference."""
        return None if self.before is None or self.after is None else self.after - self.before

    def final(self, name: str) -> float | None:
        """Mean of a figure over the last steps that have it; None where none has."""
        values = [step[name] for step in self.steps[-LAST_STEPS:] if step.get(name) is not None]
        return fmean(values) if values else None

    def overall(self, name: str) -> float | None:
        """Mean of a figure over all steps that have it; None where none has."""
        values = [step[name] for step in self.steps if step.get(name) is not None]
        return fmean(values) if values else None

    def times(self) -> list[float]:
        """Seconds from the request for the first batch to the end of each step."""
        if not self.steps:
            return []
        start = self.steps[0]["at"] - self.steps[0]["step_s"]
        return [step["at"] - start for step in self.steps]

    def _accuracy(self, place: int) -> float | None:
        return self.evals[place]["avg_at_k"] if self.evals else None
