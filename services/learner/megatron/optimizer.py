"""Optimizer of one role: Megatron's AdamW; a step is taken completely or not at all."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import megatron.core.optimizer as megatron_optimizer
import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from services.common.spec.learner import OptimizerFields
from services.learner.training.collectives import any_rank


@dataclass(frozen=True, slots=True)
class Place:
    """Values of a model parameter of this rank that one parameter of a torch optimizer updates: all, or those of a data-parallel rank.

    Example: with the distributed optimizer Place(weight of shape [64, 96], 3072, 6144) on the second of two ranks.
    """

    parameter: torch.Tensor
    """The model's."""
    start: int
    """Of its values in their flat order."""
    end: int


class Optimizer:
    """AdamW over this rank's part of the model (and, with the distributed optimizer, of the state)."""

    def __init__(self, spec: OptimizerFields, dtype: torch.dtype, model: Any, *, distributed: bool) -> None:  # noqa: ANN401  Megatron comes without types
        config = OptimizerConfig(
            optimizer="adam", lr=spec.lr, min_lr=spec.lr, adam_beta1=spec.adam_beta1, adam_beta2=spec.adam_beta2,
            adam_eps=spec.adam_eps, weight_decay=spec.weight_decay, clip_grad=spec.clip_grad, bf16=dtype is torch.bfloat16,
            params_dtype=dtype, use_distributed_optimizer=distributed,
        )  # fmt: skip
        # Older releases always exclude biases and norms from the decay; newer ones only with these overrides.
        overrides = getattr(megatron_optimizer, "get_standard_config_overrides", None)
        extra = {"config_overrides": overrides(config)} if overrides is not None else {}
        self._model = model
        self._megatron = get_megatron_optimizer(config, [model], use_gloo_process_groups=False, **extra)
        for group in self._megatron.param_groups:
            group["weight_decay"] = spec.weight_decay * group.get("wd_mult", 1.0)

    def zero_grad(self) -> None:
        """Clears the gradients of the previous step."""
        self._model.zero_grad_buffer()
        self._megatron.zero_grad()

    def step(self, loss: float, lr: float, device: torch.device) -> tuple[float, str]:
        """Takes a step of this learning rate on the reduced gradients, clipped to `clip_grad`.

        Returns the gradients' norm over all ranks, before clipping, and why no step was taken: loss or norm is not finite.
        """
        overflow = self._megatron.prepare_grads()
        norm = float(self._megatron.get_grad_norm())
        norm = math.nan if overflow else norm
        for group in self._megatron.param_groups:
            group["lr"] = lr
        # Every rank has the same sums. The explicit agreement holds even if their reduction differs, so no rank steps alone.
        if any_rank(not (math.isfinite(loss) and math.isfinite(norm)), device) or not self._megatron.step()[0]:
            return norm, f"loss {loss} and gradient norm {norm} are not both finite"
        return norm, ""

    def follow_weights(self) -> None:
        """Copies the model's weights, which were changed from outside, to the master weights."""
        self._megatron.reload_model_params()

    @property
    def parts(self) -> list[torch.optim.Optimizer]:
        """The underlying torch optimizers, which hold master weights and moments."""
        return [part.optimizer for part in self._parts]

    def places(self) -> dict[tuple[int, int, int], Place]:
        """The place of every parameter of the underlying optimizers, by the indexes of optimizer, group and parameter."""
        found: dict[tuple[int, int, int], Place] = {}
        for o, part in enumerate(self._parts):
            if hasattr(part, "model_param_group_index_map"):  # the distributed optimizer
                for parameter, (g, p) in part.model_param_group_index_map.items():
                    values = part._get_model_param_range_map(parameter)["param"]  # noqa: SLF001  nothing public says it
                    found[o, g, p] = Place(parameter, int(values.start), int(values.end))
                continue
            models = _models_of_masters(part)
            for g, group in enumerate(part.optimizer.param_groups):
                for p, own in enumerate(group["params"]):
                    parameter = models.get(id(own), own)
                    found[o, g, p] = Place(parameter, 0, parameter.numel())
        return found

    @property
    def _parts(self) -> list[Any]:
        """Megatron's optimizers that hold parameters of this rank."""
        chained = getattr(self._megatron, "chained_optimizers", [self._megatron])
        return [part for part in chained if getattr(part, "optimizer", None) is not None]


def _models_of_masters(part: Any) -> dict[int, torch.Tensor]:  # noqa: ANN401
    """Id of each master weight → the model's parameter; empty for an optimizer without master weights."""
    model_groups, master_groups = getattr(part, "float16_groups", []), getattr(part, "fp32_from_float16_groups", [])
    return {
        id(master): model
        for models, masters in zip(model_groups, master_groups, strict=True)
        for model, master in zip(models, masters, strict=True)
    }
