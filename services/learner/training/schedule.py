"""Schedule of a role's learning rate over the steps of a job; all optimizer steps of one batch have the same."""

from __future__ import annotations

import math

from services.common.spec.learner import LrSchedule, OptimizerFields


def learning_rate(spec: OptimizerFields, step: int, steps: int) -> float:
    """The rate of step `step`, counted from 1, of a job of `steps`.

    It increases linearly to `lr` at the last step of the warm-up. Then it is constant, or falls to `lr · lr_min_ratio` at step `steps`.
    """
    warmup = spec.lr_warmup_steps if spec.lr_warmup_share is None else round(spec.lr_warmup_share * steps)
    if step < warmup:
        return spec.lr * step / warmup
    share = min(1.0, (step - warmup) / max(1, steps - warmup))
    match spec.lr_schedule:
        case LrSchedule.CONSTANT:
            return spec.lr
        case LrSchedule.LINEAR:
            left = 1.0 - share
        case LrSchedule.COSINE:
            left = 0.5 * (1.0 + math.cos(math.pi * share))
    return spec.lr * (spec.lr_min_ratio + (1.0 - spec.lr_min_ratio) * left)
