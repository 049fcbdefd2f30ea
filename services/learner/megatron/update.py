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
    """The updates of a batch as one: means by tokens, but the sum of the tokens, and the first reason of a skipped step."""
    if len(updates) == 1:
        return updates[0]
    tokens = sum(update.tokens for update in updates)

    def mean(values: Sequence[float]) -> float:
        return sum(value * update.tokens for value, update in zip(values, updates, strict=True)) / tokens

    metrics = {name: mean([update.metrics[name] for update in updates]) for name in updates[0].metrics}
    if LARGEST in metrics:
        metrics[LARGEST] = max(update.metrics[LARGEST] for update in updates)
    return Update(
        loss=mean([update.loss for update in updates]),
        grad_norm=mean([update.grad_norm for update in updates]),
        tokens=tokens,
        skipped=next((update.skipped for update in updates if update.skipped), ""),
        metrics=metrics,
    )
