"""Stats of one training step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class StepStats:
    """Figures over the whole global batch, the same on every rank.

    Example: StepStats(step=3, loss=-0.012, grad_norm=0.41, lr=1e-6, tokens=41200, sequences=512, micro_batches=6, padding=0.04,
    skipped="", metrics={"entropy": 1.3, "mismatch_kl_k3": 0.0004, "clip_fraction_high": 0.02})
    """

    step: int
    """Training steps so far, this one included."""
    loss: float
    """The actor's: mean over the global batch's unmasked response tokens; NaN while only the critic is trained."""
    grad_norm: float
    """The actor's, before clipping; the mean over its optimizer steps."""
    lr: float
    tokens: int
    """Unmasked response tokens."""
    sequences: int
    micro_batches: int
    """Of each rank."""
    padding: float
    """Share of the computed positions that hold no token."""
    skipped: str = ""
    """Why the weights were not changed; empty when the step was taken."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Means over unmasked response tokens, except where the name differs: `entropy`, mismatch, and the loss function's metrics."""

    def as_record(self) -> dict[str, Any]:
        """JSON values under flat names; a figure that is not finite is None."""
        figures = {
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "lr": self.lr,
            "padding_share": self.padding,
            **self.metrics,
        }
        return {
            "optimizer_step": self.step,
            "loss_tokens": self.tokens,
            "sequences": self.sequences,
            "micro_batches": self.micro_batches,
            "skipped": self.skipped,
            **{name: value if math.isfinite(value) else None for name, value in figures.items()},
        }
