"""Critic: the value model in training; a response token's value is that of the text before it.

micro-batch ─► values ─► clipped value loss ─► gradients, summed ─► optimizer step
"""

from __future__ import annotations

from functools import partial

import torch

from services.common.spec.learner import CriticSpec
from services.learner.algorithms.values import value_loss
from services.learner.training.backend import Backend, Model
from services.learner.training.batch import MicroBatch
from services.learner.training.columns import Columns, needed
from services.learner.training.context_parallel import all_tokens
from services.learner.training.passes import Passes, PreparedBatch
from services.learner.training.tally import Tally
from services.learner.training.update import Update


class Critic:
    """This rank's part of the value model, in training."""

    def __init__(self, model: Model, spec: CriticSpec, backend: Backend, passes: Passes) -> None:
        self.model, self.spec, self._passes = model, spec, passes
        self._layout, self._device, self._context_group = backend.layout, backend.device, backend.context_group

    def values(self, batch: PreparedBatch) -> torch.Tensor:
        """The values of the batch's response tokens, float32 [N], under the present weights."""
        return self._passes.collect(self.model, batch, self._values)

    def update(self, batch: PreparedBatch, columns: Columns, lr: float) -> Update:
        """One optimizer step on the batch towards the columns' returns; the loss is the mean over its unmasked tokens."""
        tally = Tally()
        self.model.optimizer.zero_grad()
        self.model.run(batch.micro_batches, partial(self._loss, tally, columns), forward_only=False)
        metrics = tally.means(self._layout, self._device, batch.tokens)
        loss = metrics.pop("loss")
        grad_norm, skipped = self.model.optimizer.step(loss, lr, self._device)
        return Update(loss, grad_norm, batch.tokens, skipped, metrics)

    def _values(self, batch: MicroBatch, output: torch.Tensor) -> torch.Tensor:
        return all_tokens(output[:, 0], batch, self._context_group)

    def _loss(
        self, tally: Tally, columns: Columns, batch: MicroBatch, output: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        old, returns = needed(columns.values, batch), needed(columns.returns, batch)
        loss, clipped = value_loss(self._values(batch, output), old, returns, self.spec.value_clip)
        figures = {"loss": loss, "value_clip_fraction": clipped.float(), "value_mean": old, "return_mean": returns}
        tally.add(figures, batch.loss_mask)
        return torch.where(batch.loss_mask, loss, loss.new_zeros(())).sum(), batch.loss_mask.sum().int()
