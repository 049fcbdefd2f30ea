"""The learning rate of each step."""

from __future__ import annotations

from services.learner.megatron.settings import TrainerSettings


def learning_rate(settings: TrainerSettings, step: int) -> float:
    """The rate of optimizer step `step`, counted from 1: rises linearly to `lr` at step `lr_warmup_steps`, then stays."""
    if step >= settings.lr_warmup_steps:
        return settings.lr
    return settings.lr * step / settings.lr_warmup_steps
