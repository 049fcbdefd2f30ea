"""Policy: a causal model of any role, and the log-probs that it gives the tokens of a batch."""

from __future__ import annotations

import torch

from services.common.spec.job import JobSpec
from services.learner.training.backend import Backend, Model
from services.learner.training.batch import MicroBatch
from services.learner.training.context_parallel import all_tokens
from services.learner.training.logprobs import token_logprobs
from services.learner.training.passes import Passes, PreparedBatch


class Policy:
    """This rank's part of a policy."""

    def __init__(self, model: Model, spec: JobSpec, backend: Backend, passes: Passes) -> None:
        self.model, self._spec, self._passes = model, spec, passes
        self._layout, self._device = backend.layout, backend.device
        self._vocabulary_group, self._context_group = backend.vocabulary_group, backend.context_group

    def logprobs(self, batch: PreparedBatch) -> torch.Tensor:
        """Log-probs of the batch's response tokens, float32 [N], under the present weights."""
        return self._passes.collect(self.model, batch, lambda b, logits: self._logprobs(b, logits)[0])

    def _logprobs(self, batch: MicroBatch, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs of a micro-batch's response tokens, and the entropy at each, [R]."""
        logprobs, entropy = token_logprobs(
            logits,
            batch.targets if batch.own is None else batch.targets[batch.own],
            temperature=self._spec.rollout.temperature,
            group=self._vocabulary_group,
            entropy_gradient=self._spec.algorithm.entropy_coefficient > 0.0,
        )
        return all_tokens(logprobs, batch, self._context_group), all_tokens(entropy, batch, self._context_group)
