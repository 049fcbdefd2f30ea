"""Optimizer of one role: torch's AdamW on this rank's rows of the weights; a step is taken completely or not at all."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from services.common.spec.learner import OptimizerFields
from services.learner.fsdp2.sharding import Shards
from services.learner.training.collectives import any_rank

FUSED_ON = {"cpu", "cuda"}


class Optimizer:
    """AdamW. Biases, norms and other vectors do not decay, as with Megatron."""

    def __init__(
        self, spec: OptimizerFields, parameters: Mapping[str, DTensor], shards: Shards, device: torch.device
    ) -> None:
        """`parameters`: those that are trained, by name, which hold float32 weights."""
        self._clip, self._shards = spec.clip_grad, shards
        self._sharded = dict(parameters)
        self.own = {name: torch.nn.Parameter(parameter.to_local()) for name, parameter in parameters.items()}
        """Name → this rank's rows: the very memory of the model's parameter."""
        vectors = {name for name, parameter in parameters.items() if parameter.ndim == 1 or name.endswith(".bias")}
        groups = [
            {"params": [self.own[name] for name in self.own if name not in vectors], "weight_decay": spec.weight_decay},
            {"params": [self.own[name] for name in self.own if name in vectors], "weight_decay": 0.0},
        ]
        betas, fused = (spec.adam_beta1, spec.adam_beta2), True if device.type in FUSED_ON else None
        self.adam = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=spec.lr, betas=betas, eps=spec.adam_eps, fused=fused
        )

    def zero_grad(self) -> None:
        """Forgets the gradients of the previous step."""
        for parameter in self._sharded.values():
            parameter.grad = None

    def step(self, loss: float, lr: float, device: torch.device) -> tuple[float, str]:
        """`training.backend.Optimizer` describes it."""
        for name, parameter in self.own.items():
            gradient = self._sharded[name].grad
            parameter.grad = None if gradient is None else gradient.to_local()  # type: ignore[attr-defined]
        gradients = [parameter.grad for parameter in self.own.values() if parameter.grad is not None]
        norm = self._norm(gradients, device)
        if any_rank(not (math.isfinite(loss) and math.isfinite(norm)), device):
            return norm, f"loss {loss} and gradient norm {norm} are not both finite"
        if self._clip > 0.0 and (share := self._clip / (norm + 1e-6)) < 1.0:
            torch._foreach_mul_(gradients, share)
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.step()
        return norm, ""

    def follow_weights(self) -> None:
        """Does nothing: the weights are the master weights."""

    def _norm(self, gradients: list[torch.Tensor], device: torch.device) -> float:
        """Of the gradient over all ranks that share a copy."""
        norms = [torch.linalg.vector_norm(gradient.float()) for gradient in gradients if gradient.numel()]
        square = torch.stack(norms).square().sum() if norms else torch.zeros((), device=device)
        if self._shards.size > 1:
            dist.all_reduce(square, group=self._shards.group)
        return float(square.sqrt())
