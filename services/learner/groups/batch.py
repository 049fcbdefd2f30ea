"""Batch of one step: from judged groups to the sequences that ranks train, with advantages, overlong penalty and loss masks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from services.common.spec.job import JobSpec
from services.common.streams.codec import decode
from services.common.streams.limits import entry_limit
from services.common.streams.types import Rollout, ScoredGroup
from services.learner.algorithms.advantages import overlong_penalty
from services.learner.algorithms.outcomes import batch_advantages
from services.learner.groups.buffer import Judged
from services.learner.groups.sequence import Sequence
from services.learner.groups.validate import judged_rollouts


@dataclass(frozen=True, slots=True)
class Batch:
    """Input of one optimizer step."""

    groups: list[Judged]
    sequences: list[Sequence]

    @classmethod
    def of(cls, groups: list[Judged], spec: JobSpec) -> Batch:
        """Batch of these groups."""
        return cls(groups, assemble(groups, spec))

    @classmethod
    def of_payloads(cls, payloads: Iterable[bytes], spec: JobSpec) -> Batch:
        """Batch of groups in the journal's encoding."""
        limit = entry_limit(spec.rollout, spec.eval)
        return cls.of([Judged(decode(ScoredGroup, payload, limit), payload, None) for payload in payloads], spec)


def assemble(groups: list[Judged], spec: JobSpec) -> list[Sequence]:
    """One sequence for each rollout that has a reward and a token, in the groups' order."""
    scored = [judged_rollouts(judged.scored) for judged in groups]
    rewards = [np.array([reward + _length_penalty(rollout, spec) for rollout, reward in group]) for group in scored]
    lengths = [[len(rollout.tokens) for rollout, _ in group] for group in scored]
    algorithm = spec.algorithm
    advantages = batch_advantages(rewards, algorithm.advantage_estimator, lengths, revision=algorithm.revision)
    return [
        _sequence(judged, rollout, float(advantage))
        for judged, group, group_advantages in zip(groups, scored, advantages, strict=True)
        for (rollout, _), advantage in zip(group, group_advantages, strict=True)
        if rollout.token_ids
    ]


def _length_penalty(rollout: Rollout, spec: JobSpec) -> float:
    algorithm = spec.algorithm
    if not algorithm.overlong_buffer_enable:
        return 0.0
    return overlong_penalty(
        len(rollout.tokens), rollout_max_tokens=spec.rollout.rollout_max_tokens, overlong_buffer=algorithm.overlong_buffer,
        penalty_factor=algorithm.overlong_buffer_penalty_factor,
    )  # fmt: skip


def _sequence(judged: Judged, rollout: Rollout, advantage: float) -> Sequence:
    prompt, response = judged.scored.group.prompt_tokens, rollout.tokens
    return Sequence(
        tokens=np.concatenate([prompt, response]),
        prompt_len=len(prompt),
        inference_logprobs=rollout.logprobs,
        advantage=np.full(len(response), advantage, np.float32),
        loss_mask=np.ones(len(response), bool),
        group_id=judged.group_id,
    )
