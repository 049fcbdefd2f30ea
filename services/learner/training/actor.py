"""Actor: the policy in training.

micro-batch ─► log-probs, entropy ─► loss function ─► gradients, summed ─► optimizer step
"""

from __future__ import annotations

from functools import partial

import torch

from services.common.spec.choices import ProximalPolicy
from services.common.spec.job import JobSpec
from services.learner.algorithms.losses import LossFunction, LossInputs, effective_sample_share, mismatch_metrics
from services.learner.training.backend import Backend, Model
from services.learner.training.batch import MicroBatch
from services.learner.training.columns import Columns, needed, of
from services.learner.training.passes import Passes, PreparedBatch
from services.learner.training.policy import Policy
from services.learner.training.tally import Tally
from services.learner.training.update import LARGEST, Update


class Actor(Policy):
    """This rank's part of the policy in training."""

    def __init__(self, model: Model, spec: JobSpec, backend: Backend, passes: Passes, loss_fn: LossFunction) -> None:
        super().__init__(model, spec, backend, passes)
        self.loss_fn = loss_fn

    def update(self, batch: PreparedBatch, columns: Columns, lr: float, kl_coefficient: float) -> Update:
        """One optimizer step on the batch; its loss is the sum of token losses divided by the number of unmasked tokens."""
        tally = Tally()
        self.model.optimizer.zero_grad()
        loss_of = partial(self._loss, tally, batch, columns, kl_coefficient)
        self.model.run(batch.micro_batches, loss_of, forward_only=False)
        metrics = tally.means(self._layout, self._device, batch.tokens)
        share = effective_sample_share(metrics.pop("ratio"), metrics.pop("ratio_squared"))
        metrics |= {"effective_sample_share": share, LARGEST: tally.largest(self._device)}
        metrics |= self.model.figures()
        loss = metrics.pop("loss")
        grad_norm, skipped = self.model.optimizer.step(loss, lr, self._device)
        return Update(loss, grad_norm, batch.tokens, skipped, metrics)

    def _loss(
        self,
        tally: Tally,
        whole: PreparedBatch,
        columns: Columns,
        kl_coefficient: float,
        batch: MicroBatch,
        logits: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, entropy = self._logprobs(batch, logits)
        detached = logprobs.detach()
        inputs = LossInputs(
            trainer_logprobs=logprobs,
            old_logprobs=self._proximal(batch, columns, detached),
            inference_logprobs=batch.inference_logprobs,
            advantages=columns.advantages[batch.offsets],
            loss_mask=batch.loss_mask,
            sequence_ids=batch.sequence_ids,
            global_tokens=whole.tokens,
            global_sequences=whole.counting,
            entropy=entropy,
            reference_logprobs=of(columns.reference_logprobs, batch),
            kl_coefficient=kl_coefficient,
            importance_kept=of(columns.importance_kept, batch),
        )
        token_loss, metrics = self.loss_fn(inputs)
        own = {"loss": token_loss, "entropy": entropy, **mismatch_metrics(detached, batch.inference_logprobs)}
        tally.add(metrics | own, batch.loss_mask)
        tally.add_difference(detached - batch.inference_logprobs, batch.loss_mask)
        loss = torch.where(batch.loss_mask, token_loss, token_loss.new_zeros(())).sum()
        return loss, batch.loss_mask.sum().int()

    def _proximal(self, batch: MicroBatch, columns: Columns, present: torch.Tensor) -> torch.Tensor:
        """Log-probs of the proximal policy, [R], without gradient; `present`: those of the weights being trained."""
        match self._spec.algorithm.proximal_policy:
            case ProximalPolicy.INFERENCE:
                return batch.inference_logprobs
            case ProximalPolicy.TRAINER:
                old = of(columns.old_logprobs, batch)
                return present if old is None else old  # in a batch's only optimizer step they are the same
            case ProximalPolicy.INTERPOLATED:
                share = needed(columns.proximal_share, batch)
                return batch.inference_logprobs + share * (present - batch.inference_logprobs)
