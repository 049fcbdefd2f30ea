"""Optimizer: Megatron's AdamW with a linear warm-up; a step is taken completely or not at all."""

from __future__ import annotations

import math
from typing import Any

import megatron.core.optimizer as megatron_optimizer
import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from services.common.spec.learner import LearnerSpec


class Optimizer:
    """AdamW over this rank's part of the model (and, with the distributed optimizer, of the state)."""

    def __init__(self, spec: LearnerSpec, dtype: torch.dtype, model: Any) -> None:  # noqa: ANN401  Megatron comes without types
        config = OptimizerConfig(
            optimizer="adam", lr=spec.lr, min_lr=spec.lr, adam_beta1=spec.adam_beta1, adam_beta2=spec.adam_beta2,
            adam_eps=spec.adam_eps, weight_decay=spec.weight_decay, clip_grad=spec.clip_grad, bf16=dtype is torch.bfloat16,
            params_dtype=dtype, use_distributed_optimizer=spec.use_distributed_optimizer,
        )  # fmt: skip
        # Older releases always exclude biases and norms from the decay; newer ones only with these overrides.
        overrides = getattr(megatron_optimizer, "get_standard_config_overrides", None)
        extra = {"config_overrides": overrides(config)} if overrides is not None else {}
        self._spec = spec
        self._megatron = get_megatron_optimizer(config, [model], use_gloo_process_groups=False, **extra)
        for group in self._megatron.param_groups:
            group["weight_decay"] = spec.weight_decay * group.get("wd_mult", 1.0)

    def zero_grad(self) -> None:
        """Clears the gradients of the previous step."""
        self._megatron.zero_grad()

    def prepare(self) -> float:
        """The norm of the reduced gradients over all ranks, before clipping; NaN where they overflow."""
        overflow = self._megatron.prepare_grads()
        norm = float(self._megatron.get_grad_norm())
        return math.nan if overflow else norm

    def step(self, step: int) -> bool:
        """Takes optimizer step `step` (from 1) on the prepared gradients, clipped to `clip_grad`; returns whether it was taken."""
        for group in self._megatron.param_groups:
            group["lr"] = learning_rate(self._spec, step)
        taken, _, _ = self._megatron.step()
        return bool(taken)

    def follow_weights(self) -> None:
        """Copies the model's weights, which were changed from outside, to the master weights."""
        self._megatron.reload_model_params()

    @property
    def parts(self) -> list[torch.optim.Optimizer]:
        """The underlying torch optimizers, which hold master weights and moments."""
        chained = getattr(self._megatron, "chained_optimizers", [self._megatron])
        return [part.optimizer for part in chained if getattr(part, "optimizer", None) is not None]


def learning_rate(spec: LearnerSpec, step: int) -> float:
    """The rate of optimizer step `step`, counted from 1: increases linearly to `lr` at step `lr_warmup_steps`, then is constant."""
    if step >= spec.lr_warmup_steps:
        return spec.lr
    return spec.lr * step / spec.lr_warmup_steps
