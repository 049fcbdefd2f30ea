"""What a chaos run found: one line for people, one JSON object for programs."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Result:
    """One row of the table in docs/reliability.md."""

    fault: str
    count: int
    """Independent trials."""
    seed: int
    groups: dict[str, int] = field(default_factory=dict)
    """By fate, and `issued`."""
    progress_s: list[float] = field(default_factory=list)
    """Of each trial: seconds from the fault until the job had gone on."""
    progress_p95_s: float | None = None
    """What the 95th percentile of `progress_s` should stay below; None where nothing is promised of it."""
    violations: list[str] = field(default_factory=list)
    seconds: float = 0.0
    """Wall-clock time of the whole run."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Figures that only this fault has."""

    @property
    def good(self) -> bool:
        """Whether nothing was violated, in at least one trial."""
        return not self.violations and self.count > 0

    @property
    def missed(self) -> str:
        """Which time was not reached, in words; empty when all was. No violation: the job went on, but later than it should."""
        return missed(summary(self.progress_s), self.progress_p95_s)

    @property
    def bound(self) -> float:
        """Upper end of the 95 % interval of a violation's probability per trial, when none was seen: the rule of three."""
        return 3 / self.count

    def as_json(self) -> str:
        """One line."""
        return json.dumps(
            {
                "fault": self.fault, "count": self.count, "seed": self.seed, "violations": self.violations,
                "missed": self.missed, "bound": round(self.bound, 6), "groups": self.groups, "progress_s": summary(self.progress_s),
                "seconds": round(self.seconds, 1), "cores": len(os.sched_getaffinity(0)), **self.extra,
            }
        )  # fmt: skip

    def as_text(self) -> str:
        """One line for people."""
        what = "0 violations" if self.good else f"{len(self.violations)} VIOLATIONS, the first: {self.violations[0]}"
        words = [f"{self.fault}: {self.count} trials (seed {self.seed}), {what}, bound < {self.bound:.2g}"]
        if self.groups:
            words.append(", ".join(f"{count} {name}" for name, count in self.groups.items()))
        if self.progress_s:
            times = summary(self.progress_s)
            words.append(f"went on after p50 {times['p50']} s, p95 {times['p95']} s, max {times['max']} s")
        words += [self.missed] if self.missed else []
        words += [f"{name} {value}" for name, value in self.extra.items()]
        return "; ".join([*words, f"{self.seconds:.0f} s in all"])


def missed(times: Mapping[str, float], p95_s: float | None) -> str:
    """What `summary` gave, held against the promised 95th percentile: empty, or how it was missed."""
    if p95_s is None or not times or times["p95"] <= p95_s:
        return ""
    return f"went on late: p95 {times['p95']:g} s, not {p95_s:g} s"


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """p50, p95 and maximum (nearest rank: each is a value that was seen)."""
    if not seconds:
        return {}
    ordered = sorted(seconds)

    def at(share: float) -> float:
        return round(ordered[max(0, math.ceil(share * len(ordered)) - 1)], 2)

    return {"p50": at(0.5), "p95": at(0.95), "max": round(ordered[-1], 2)}
