"""Log-probs of the target tokens, and entropies, from logits whose vocabulary is split over the tensor-parallel ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable


def token_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, *, temperature: float = 1.0, group: dist.ProcessGroup | None = None,
    entropy_gradient: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Log-probs of the targets [R], differentiable, and entropies [R] in nats, of softmax(logits / temperature).

    Args:
        logits: [R, V / TP], this rank's slice of the vocabulary, in rank order; computed in at least float32.
        targets: int64 [R], ids in the full vocabulary.
        temperature: above 0.
        group: the tensor-parallel group; None where the vocabulary is not split.
        entropy_gradient: whether the entropies are differentiable too; the backward pass then takes one more pass over the vocabulary.
    """
    values: tuple[torch.Tensor, torch.Tensor]
    if logits.is_cuda and logits.dtype is not torch.float64:
        from services.learner.training.fused_logprobs import FusedTokenLogprobs

        first = logits.shape[-1] * (dist.get_rank(group) if group is not None else 0)
        values = FusedTokenLogprobs.apply(logits, targets, temperature, first, partial(_over, group), entropy_gradient)  # type: ignore[no-untyped-call]
    else:
        values = _TokenLogprobs.apply(logits, targets, temperature, group, entropy_gradient)  # type: ignore[no-untyped-call]
    return values


def _over(group: dist.ProcessGroup | None, values: torch.Tensor, *, largest: bool) -> torch.Tensor:
    return _reduced(values, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group)


class _TokenLogprobs(torch.autograd.Function):
    """One softmax for value, entropy and gradient."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  torch's own type of it is private
        logits: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        group: dist.ProcessGroup | None,
        entropy_gradient: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
        peak = _reduced(scaled.amax(dim=-1), dist.ReduceOp.MAX, group)
        scaled -= peak[:, None]
        width = scaled.shape[-1]
        local = targets - width * (dist.get_rank(group) if group is not None else 0)
        here = (local >= 0) & (local < width)
        local = torch.where(here, local, torch.zeros_like(local))
        target = torch.where(here, scaled.gather(-1, local[:, None])[:, 0], scaled.new_zeros(()))
        weights = scaled.exp()
        sums = torch.stack([weights.sum(-1), _weighted_sum(weights, scaled), target])
        total, weighted, target = _reduced(sums, dist.ReduceOp.SUM, group)
        log_total = total.log()
        entropy = log_total - weighted / total
        ctx.save_for_backward(weights.div_(total[:, None]), local, here, entropy if entropy_gradient else None)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return target - log_total, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,  # noqa: ANN401
        grad: torch.Tensor,
        entropy_grad: torch.Tensor,
    ) -> tuple[torch.Tensor, None, None, None, None]:
        """With z the logits / temperature: ∂ log p_y / ∂z_j = [j = y] − p_j, and ∂H / ∂z_j = −p_j (log p_j + H), H being whole already."""
        probabilities, local, here, entropy = ctx.saved_tensors
        scale = grad / ctx.temperature
        entropy_scale = None if entropy is None else entropy_grad / ctx.temperature
        shared = -scale if entropy_scale is None else -scale - entropy_scale * entropy
        gradient = probabilities * shared[:, None]
        if entropy_scale is not None:
            gradient.addcmul_(torch.special.entr(probabilities), entropy_scale[:, None])
        gradient.scatter_add_(-1, local[:, None], torch.where(here, scale, torch.zeros_like(scale))[:, None])
        return gradient.to(ctx.dtype), None, None, None, None


def _weighted_sum(weights: torch.Tensor, logs: torch.Tensor) -> torch.Tensor:
    """Σ weights · logs over the last dimension, with 0 · −inf = 0: the term of an impossible token in an entropy."""
    summed = (weights * logs).sum(-1)
    if not bool(summed.isnan().any()):
        return summed  # only masked logits need the second pass over the vocabulary
    return torch.where(weights > 0.0, weights * logs, 0.0).sum(-1)


def _reduced(values: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> torch.Tensor:
    if group is not None and values.numel() and dist.get_world_size(group) > 1:
        dist.all_reduce(values, op=op, group=group)
    return values
