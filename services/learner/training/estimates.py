"""Estimates of a step: the columns of a batch, from the passes of all roles.

actor, reference, critic ─► log-probs, values ─► KL in the reward ─► advantages, returns
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from services.common.spec.choices import ImportanceCorrection, ProximalPolicy
from services.common.spec.job import JobSpec
from services.common.streams.types import Float32Array
from services.learner.algorithms.advantages import Responses, estimate
from services.learner.algorithms.importance import second_moment_mask
from services.learner.algorithms.kl import reference_kl
from services.learner.groups.sequence import Sequence
from services.learner.training.actor import Actor
from services.learner.training.backend import Model
from services.learner.training.batch import response_offsets
from services.learner.training.columns import Columns
from services.learner.training.critic import Critic
from services.learner.training.passes import PreparedBatch


@dataclass(frozen=True, slots=True)
class Estimator:
    """Makes the columns of a batch. Every rank makes the same ones, so nothing is sent but the passes' results."""

    spec: JobSpec
    actor: Actor
    critic: Critic | None
    reference: Model | None
    device: torch.device

    def columns(self, batch: PreparedBatch, step: int, kl_coefficient: float) -> Columns:
        """The columns of step `step`, before its first optimizer step."""
        reference = None if self.reference is None else self.actor.logprobs(batch, self.reference)
        old = self.actor.logprobs(batch) if self._wants_old_logprobs() else None
        columns = Columns(
            advantages=self._column([s.advantage for s in batch.sequences]),
            old_logprobs=old,
            reference_logprobs=reference,
            values=None if self.critic is None else self.critic.values(batch),
            proximal_share=self._proximal_share(batch.sequences, step),
            importance_kept=self._importance_kept(batch.sequences, old),
        )
        return self._estimated(batch.sequences, columns, kl_coefficient) if self.spec.ranks_estimate else columns

    def _wants_old_logprobs(self) -> bool:
        """Whether the log-probs at the start of the step are needed after its first optimizer step, or of the whole batch at once."""
        algorithm = self.spec.algorithm
        whole = algorithm.kl_in_reward or algorithm.importance_correction is ImportanceCorrection.M2PO
        return algorithm.proximal_policy is ProximalPolicy.TRAINER and (self.spec.updates_per_step > 1 or whole)

    def _proximal_share(self, sequences: list[Sequence], step: int) -> torch.Tensor | None:
        """α = (v_prox − v_μ) / (v_θ − v_μ): the step makes version `step` of `step` − 1."""
        if self.spec.algorithm.proximal_policy is not ProximalPolicy.INTERPOLATED:
            return None
        versions = np.concatenate([s.versions for s in sequences if s.versions is not None])
        age = step - np.minimum(versions, step - 1)
        return self._column([(age - 1) / age])

    def _importance_kept(self, sequences: list[Sequence], old: torch.Tensor | None) -> torch.Tensor | None:
        threshold = self.spec.algorithm.importance_m2_threshold
        if threshold is None or old is None:
            return None
        inference = np.concatenate([s.inference_logprobs for s in sequences]).astype(np.float64)
        mask = np.concatenate([s.loss_mask for s in sequences])
        kept = np.ones(len(mask), bool)
        kept[mask] = second_moment_mask((old.cpu().numpy().astype(np.float64) - inference)[mask], threshold)
        return torch.from_numpy(kept).to(self.device)

    def _estimated(self, sequences: list[Sequence], columns: Columns, kl_coefficient: float) -> Columns:
        """With advantages, and for a critic returns, in place of the head's."""
        values = columns.values
        responses = Responses(
            group_ids=[s.group_id for s in sequences],
            rewards=[s.reward for s in sequences],
            masks=[s.loss_mask for s in sequences],
            kl_penalties=self._kl_penalties(sequences, columns, kl_coefficient),
            values=None if values is None else _by_sequence(values.cpu().numpy(), sequences),
        )
        estimated = estimate(responses, self.spec.algorithm)
        returns = None if estimated.returns is None else self._column(estimated.returns)
        return replace(columns, advantages=self._column(estimated.advantages), returns=returns)

    def _kl_penalties(
        self, sequences: list[Sequence], columns: Columns, kl_coefficient: float
    ) -> list[npt.NDArray[np.float64]] | None:
        """β times the KL of each token to the reference, under the proximal policy where the trainer has it, else the engine's."""
        algorithm, reference = self.spec.algorithm, columns.reference_logprobs
        if reference is None or not algorithm.kl_in_reward:
            return None
        policy = columns.old_logprobs
        if policy is None:
            policy = self._column([s.inference_logprobs for s in sequences])
        penalty = kl_coefficient * reference_kl(algorithm.kl_estimator, policy, reference).double()
        return _by_sequence(penalty.cpu().numpy(), sequences)

    def _column(self, parts: list[Float32Array]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts).astype(np.float32)).to(self.device)


def _by_sequence(column: npt.NDArray[Any], sequences: list[Sequence]) -> list[npt.NDArray[Any]]:
    return np.split(column, response_offsets(sequences)[1:-1])
