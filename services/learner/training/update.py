"""Update: the result of one optimizer step of a role, and the mean over those of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LARGEST = "max_abs_logprob_difference"
"""The one metric that is a maximum, not a mean."""


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer step, the same on every rank."""

    loss: float
    """Mean over the unmasked response tokens."""
    grad_norm: float
    """Before clipping."""
    tokens: int
    skipped: str
    """Why the weights were not changed; empty when the step was taken."""
    metrics: dict[str, float]
    """Means over the same tokens, except where the name differs."""


def mean_of(updates: Sequence[Update]) -> Update:
    """The updates of a batch as one: means by tokens, but the sum of the tokens, and the first reason of a skipped step.

    A metric that an installed loss reports for some of them only is the mean over those.
    """
    if len(updates) == 1:
        return updates[0]
    names = dict.fromkeys(name for update in updates for name in update.metrics)
    metrics = {
        name: _mean([(update.metrics[name], update.tokens) for update in updates if name in update.metrics])
        for name in names
    }
    if LARGEST in metrics:
        metrics[LARGEST] = max(update.metrics[LARGEST] for update in updates if LARGEST in update.metrics)
    return Update(
        loss=_mean([(update.loss, update.tokens) for update in updates]),
        grad_norm=_mean([(update.grad_norm, update.tokens) for update in updates]),
        tokens=sum(update.tokens for update in updates),
        skipped=next((update.skipped for update in updates if update.skipped), ""),
        metrics=metrics,
    )


def _mean(weighted: Sequence[tuple[float, int]]) -> float:
    """The mean of (value, weight); the weights are above 0."""
    return sum(value * weight for value, weight in weighted) / sum(weight for _, weight in weighted)
