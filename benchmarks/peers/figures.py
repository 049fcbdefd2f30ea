"""Figures of a run: steps with their ends, and what follows from them. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

STEP_LIMIT_S = 180.0
"""Longest time of a step: several times that of the slowest one that is known."""


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step. Example: Step(at=1763800000.5, samples=512, informative=408, reward=0.41, train_s=0.2)."""

    at: float
    """Unix seconds of its end."""
    samples: int
    """Samples of its batch."""
    informative: int
    """Those of groups whose accuracies differ: the others have no advantage."""
    reward: float
    """Mean over all samples judged for it, filtered ones included."""
    tokens: int = 0
    """Response tokens of its batch."""
    train_s: float = 0.0
    """Seconds of forward, backward and optimizer."""


@dataclass(frozen=True, slots=True)
class Run:
    """The steps of one way in one round, in order."""

    steps: tuple[Step, ...]
    peak_bytes: int
    """Largest sum of the resident memory of its processes."""
    started: float
    """Unix seconds at which its process, or its job, was started."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Median over the rounds, with the smallest and the largest value."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Learning:
    """A reward whose time is compared."""

    threshold: float
    window: int
    """Steps over which the reward is averaged."""
    limit_s: float
    """A run that has not reached it by then ends all the same."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How long a run is measured."""

    warm_up: int
    """Steps before those that are measured: the first ones are slow, and fill the pipeline."""
    least: int
    """Fewest measured steps."""
    seconds: float
    """Least time of the measured steps."""
    learning: Learning | None = None
    """If given, the run goes on until this reward is reached."""


def is_measured(steps: Sequence[Step], plan: Plan) -> bool:
    """Whether the run may end."""
    if len(steps) < plan.warm_up + plan.least or steps[-1].at - steps[plan.warm_up - 1].at < plan.seconds:
        return False
    learning = plan.learning
    return learning is None or time_to(steps, learning) is not None or steps[-1].at - steps[0].at >= learning.limit_s


def longest_s(plan: Plan) -> float:
    """Seconds after which a run that has begun counts as hanging."""
    learning = 0.0 if plan.learning is None else plan.learning.limit_s
    return plan.seconds + learning + (plan.warm_up + plan.least) * STEP_LIMIT_S


def measured_s(run: Run, warm_up: int) -> float:
    """Seconds from the end of the last warm-up step to the end of the last step.

    Raises:
        ValueError: no step follows the warm-up, or no time passed.
    """
    if warm_up < 1 or len(run.steps) <= warm_up:
        raise ValueError(f"{len(run.steps)} steps, of which the first {warm_up} are warm-up: nothing was measured")
    seconds = run.steps[-1].at - run.steps[warm_up - 1].at
    if seconds <= 0.0:
        raise ValueError("the steps' times do not rise")
    return seconds


def samples_per_s(run: Run, warm_up: int) -> float:
    """Trained samples of the steps after the warm-up, divided by their time."""
    return sum(step.samples for step in run.steps[warm_up:]) / measured_s(run, warm_up)


def informative_per_s(run: Run, warm_up: int) -> float:
    """The same of informative samples."""
    return sum(step.informative for step in run.steps[warm_up:]) / measured_s(run, warm_up)


def step_s(run: Run, warm_up: int) -> float:
    """Mean seconds of a step after the warm-up."""
    return measured_s(run, warm_up) / (len(run.steps) - warm_up)


def smooth(rewards: Sequence[float], window: int) -> list[float]:
    """Mean of each `window` consecutive rewards; one value per step from the `window`-th on."""
    return [statistics.fmean(rewards[end - window : end]) for end in range(window, len(rewards) + 1)]


def time_to(steps: Sequence[Step], learning: Learning) -> float | None:
    """Seconds from the end of the first step until the smoothed reward is at the threshold; None if it never is."""
    curve = smooth([step.reward for step in steps], learning.window)
    ends = [step.at for step in steps[learning.window - 1 :]]
    reached = (at for at, reward in zip(ends, curve, strict=True) if reward >= learning.threshold)
    return next((at - steps[0].at for at in reached), None)


def informative_samples(accuracies: Sequence[float], group_size: int) -> int:
    """Samples of groups, `group_size` consecutive ones each, whose accuracies are not all equal."""
    groups = [accuracies[start : start + group_size] for start in range(0, len(accuracies), group_size)]
    return sum(len(group) for group in groups if len(set(group)) > 1)
