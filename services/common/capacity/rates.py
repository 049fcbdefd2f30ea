"""Rates of a job, measured by the records of its steps: what each side can do, as far as the records show it.

A server's speed is seen only while it has work: `rollout_busy_s` says how long that was, so that a learner that was the limit does not make
the servers look slow. How much of a group's seconds is its own, and how much comes from the groups sampled beside it, no single run shows:
where a forecast depends on it, it holds for both extremes (`Rates.laws`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from services.common.capacity.pipeline import ServiceLaw
from services.common.errors import ConfigError
from services.common.jobs.step_record import StepRecord

WARM_UP_STEPS = 3
"""First steps of a job, which are left out: engine and ranks are still warming up, and the slots fill."""
MIN_STEPS = 8
"""Fewest steps after them that rates can be taken from."""
MAX_STEPS = 200
"""Newest steps that are used: accept rate and lengths change as the policy learns."""
INTERRUPTED = 8.0
"""A period that is so many times the median held a pause or a restart, and is left out."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Means over the steps that were used."""

    first_step: int
    last_step: int
    steps: int
    """Number of steps used."""
    servers: int
    """Rollout servers that sampled."""
    period_s: float
    """From one step's end to the next."""
    learner_s: float
    """The learner's own part of it: all but its wait for the batch."""
    groups_trained: float
    """Groups of a step."""
    groups_judged: float
    """Groups that were judged for a step, filtered ones included."""
    samples_per_group: float
    """Sequences in a trained group."""
    tokens_per_group: float
    """Response tokens of a judged group."""
    group_s: float
    """Seconds that a server took for a group."""
    busy_share: float
    """Share of the time in which a server had a group or more, mean over the servers, at most 1."""
    groups_at_once: float
    """Groups that a server sampled at once while it had any, at least 1."""
    sync_s: float
    pause_s: float
    policy_age_mean: float
    policy_age_max: int
    """The oldest group of the median step."""

    @property
    def accept_rate(self) -> float:
        """Groups trained for one that was judged, at most 1."""
        return min(self.groups_trained / self.groups_judged, 1.0)

    @property
    def samples_per_s(self) -> float:
        """Trained sequences per second."""
        return self.groups_trained * self.samples_per_group / self.period_s

    @property
    def tokens_per_s(self) -> float:
        """Response tokens that the servers sampled per second, all together."""
        return self.groups_judged * self.tokens_per_group / self.period_s

    def laws(self, places: int) -> tuple[ServiceLaw, ServiceLaw]:
        """The two extremes that give the measured `group_s`: a group costs the server's capacity alone, or time alone."""
        capacity = ServiceLaw(0.0, self.group_s / self.groups_at_once, places)
        return capacity, ServiceLaw(self.group_s, 0.0, places)


def measure(records: Sequence[StepRecord]) -> Rates:
    """Rates of consecutive step records of one job, oldest first.

    Raises:
        ConfigError: too few steps can be used; the message says how many, and what they lack.
    """
    pairs = [(before, after) for before, after in pairwise(records) if _follows(before, after)]
    pairs = pairs[max(0, WARM_UP_STEPS - 1) :][-MAX_STEPS:]
    if len(pairs) < MIN_STEPS:
        raise ConfigError(_too_few(records, len(pairs)))
    usual_s = median(_period_s(pair) for pair in pairs)
    pairs = [pair for pair in pairs if _period_s(pair) <= INTERRUPTED * usual_s]
    return _means([after for _, after in pairs], fmean(map(_period_s, pairs)))


def _means(steps: Sequence[StepRecord], period_s: float) -> Rates:
    """Means over these steps, whose mean period is given."""
    servers = max(step.rollout_servers or 0 for step in steps)
    sampled = sum(step.groups_sampled or 0 for step in steps)
    seconds = sum((step.groups_sampled or 0) * (step.generate_s_mean or 0.0) for step in steps)
    busy_s = sum(step.rollout_busy_s or 0.0 for step in steps)
    trained, judged = (
        fmean(step.groups_trained or 0 for step in steps),
        fmean(step.groups_judged or 0 for step in steps),
    )
    tokens = period_s * fmean(step.generated_tokens_per_s or 0.0 for step in steps)
    if not sampled or not trained or not judged or busy_s <= 0.0:
        raise ConfigError("no group was sampled in the steps that can be used")
    return Rates(
        first_step=steps[0].step,
        last_step=steps[-1].step,
        steps=len(steps),
        servers=servers,
        period_s=period_s,
        learner_s=max(period_s - fmean(step.wait_s or 0.0 for step in steps), 1e-6),
        groups_trained=trained,
        groups_judged=judged,
        samples_per_group=fmean(step.sequences or 0 for step in steps) / trained,
        tokens_per_group=tokens / judged,
        group_s=seconds / sampled,
        busy_share=min(busy_s / (servers * period_s * len(steps)), 1.0),
        groups_at_once=max(seconds / busy_s, 1.0),
        sync_s=fmean(step.sync_s or 0.0 for step in steps),
        pause_s=fmean(step.pause_s or 0.0 for step in steps),
        policy_age_mean=fmean(step.policy_age_mean or 0.0 for step in steps),
        policy_age_max=round(median(step.policy_age_max or 0 for step in steps)),
    )


def _follows(before: StepRecord, after: StepRecord) -> bool:
    """Whether `after` is the next step of the same run, with the figures of its servers."""
    consecutive = after.step == before.step + 1 and after.lineage == before.lineage and not after.replayed
    return consecutive and None not in {before.at, after.at, after.wait_s, after.groups_sampled}


def _period_s(pair: tuple[StepRecord, StepRecord]) -> float:
    before, after = pair
    return (after.at or 0.0) - (before.at or 0.0)


def _too_few(records: Sequence[StepRecord], usable: int) -> str:
    needed = WARM_UP_STEPS + MIN_STEPS
    if len(records) >= needed and all(record.groups_sampled is None for record in records):
        return "its steps do not say how long the rollout servers had work: an earlier release trained them"
    return f"a plan needs {needed} steps in a row, and {usable} of its {len(records)} can be used: let it run on"
