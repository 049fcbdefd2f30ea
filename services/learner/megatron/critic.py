"""Critic: the value model in training; a response token's value is that of the text before it.

micro-batch ─► values ─► clipped value loss ─► gradients, summed ─► optimizer step
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from services.common.spec.job import JobSpec
from services.common.spec.learner import CriticSpec
from services.learner.algorithms.values import value_loss
from services.learner.megatron.batch import MicroBatch
from services.learner.megatron.columns import Columns, needed
from services.learner.megatron.context_parallel import all_tokens
from services.learner.megatron.model import build_value_model, torch_dtype
from services.learner.megatron.optimizer import Optimizer
from services.learner.megatron.parallel import Layout
from services.learner.megatron.passes import Passes, PreparedBatch
from services.learner.megatron.tally import Tally
from services.learner.megatron.update import Update


class Critic:
    """This rank's part of the value model, and its optimizer."""

    def __init__(
        self, model_dir: Path, critic: CriticSpec, spec: JobSpec, layout: Layout, device: torch.device, passes: Passes
    ) -> None:
        """Builds the model; ModelError if it cannot be trained in this layout."""
        self.spec, self._layout, self._device, self._passes = critic, layout, device, passes
        self.part = build_value_model(model_dir, spec, layout)
        dtype, distributed = torch_dtype(spec.model.dtype), spec.learner.use_distributed_optimizer
        self.optimizer = Optimizer(critic, dtype, self.part.model, distributed=distributed)

    def values(self, batch: PreparedBatch) -> torch.Tensor:
        """The values of the batch's response tokens, float32 [N], under the present weights."""
        return self._passes.collect(self.part, batch, lambda b, output: all_tokens(output[:, 0], b))

    def update(self, batch: PreparedBatch, columns: Columns, lr: float) -> Update:
        """One optimizer step on the batch towards the columns' returns; the loss is the mean over its unmasked tokens."""
        tally = Tally()
        self.optimizer.zero_grad()
        self._passes.run(self.part, batch, partial(self._loss, tally, columns), forward_only=False)
        metrics = tally.means(self._layout, self._device, batch.tokens)
        loss = metrics.pop("loss")
        grad_norm, skipped = self.optimizer.step(loss, lr, self._device)
        return Update(loss, grad_norm, batch.tokens, skipped, metrics)

    def _loss(
        self, tally: Tally, columns: Columns, batch: MicroBatch, output: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        old, returns = needed(columns.values, batch), needed(columns.returns, batch)
        loss, clipped = value_loss(all_tokens(output[:, 0], batch), old, returns, self.spec.value_clip)
        figures = {"loss": loss, "value_clip_fraction": clipped.float(), "value_mean": old, "return_mean": returns}
        tally.add(figures, batch.loss_mask)
        return torch.where(batch.loss_mask, loss, loss.new_zeros(())).sum(), batch.loss_mask.sum().int()
