"""Estimates of a step: the columns of a batch, from the passes of all roles.

actor, reference, critic ─► log-probs, values ─► every rank ─► KL in the reward ─► advantages, returns
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
from services.learner.training.batch import response_offsets
from services.learner.training.columns import Columns
from services.learner.training.critic import Critic
from services.learner.training.passes import PreparedBatch
from services.learner.training.policy import Policy
from services.learner.training.pools import ACTOR, Pools


@dataclass(frozen=True, slots=True)
class Estimator:
    """Makes the columns of a batch. Every rank makes the same ones, so nothing is sent but the passes' results."""

    spec: JobSpec
    pools: Pools
    actor: Actor | None
    critic: Critic | None
    reference: Policy | None
    """None where the job has no such role, or other ranks hold it."""
    device: torch.device

    def columns(self, batch: PreparedBatch, step: int, kl_coefficient: float) -> Columns:
        """The columns of step `step`, before its first optimizer step."""
        found = self._passes(batch)
        old = found.get(ACTOR)
        columns = Columns(
            advantages=self._column([s.advantage for s in batch.sequences]),
            old_logprobs=old,
            reference_logprobs=found.get("reference"),
            values=found.get("critic"),
            proximal_share=self._proximal_share(batch.sequences, step),
            importance_kept=self._importance_kept(batch.sequences, old),
        )
        return self._estimated(batch.sequences, columns, kl_coefficient) if self.spec.ranks_estimate else columns

    def _passes(self, batch: PreparedBatch) -> dict[str, torch.Tensor]:
        """What the roles say of the batch, by role; roles with ranks of their own compute at the same time."""
        wanted, own = [], {}
        if self.spec.reference is not None:
            wanted.append("reference")
            if self.reference is not None:
                own["reference"] = self.reference.logprobs(batch)
        if self._wants_old_logprobs():
            wanted.append(ACTOR)
            if self.actor is not None:
                own[ACTOR] = self.actor.logprobs(batch)
        if self.spec.critic is not None:
            wanted.append("critic")
            if self.critic is not None:
                own["critic"] = self.critic.values(batch)
        length = response_offsets(batch.sequences)[-1]
        return {role: self.pools.column(role, own.get(role), length) for role in wanted}

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
