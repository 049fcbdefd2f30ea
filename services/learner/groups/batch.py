"""Batch of one step: from judged groups to the sequences that ranks train, with advantages, overlong penalty and loss masks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from services.common.spec.choices import ProximalPolicy, TurnCredit
from services.common.spec.job import JobSpec
from services.common.streams.codec import decode
from services.common.streams.limits import entry_limit
from services.common.streams.types import BoolArray, Rollout, ScoredGroup
from services.learner.algorithms.advantages import Responses, Turns, estimate, overlong_penalty
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

    @property
    def sampled_tokens(self) -> int:
        """Tokens of the sequences that the policy sampled."""
        return sum(rollout.sampled_tokens for judged in self.groups for rollout, _ in judged_rollouts(judged.scored))

    @property
    def turns_mean(self) -> float | None:
        """Mean turns of the rollouts that are episodes; None without one."""
        rollouts = (rollout for judged in self.groups for rollout in judged.scored.group.rollouts)
        turns = [len(rollout.turns) for rollout in rollouts if rollout.turns]
        return fmean(turns) if turns else None


def assemble(groups: list[Judged], spec: JobSpec) -> list[Sequence]:
    """One sequence for each rollout that has a reward and a token, in the groups' order."""
    scored = [(judged, rollout, reward) for judged in groups for rollout, reward in judged_rollouts(judged.scored)]
    rewards = [reward + _length_penalty(rollout, spec) for _, rollout, reward in scored]
    masks = [_loss_mask(rollout, spec) for _, rollout, _ in scored]
    if spec.ranks_estimate:
        advantages = [np.zeros(len(mask), np.float32) for mask in masks]
    else:
        turns = None
        if spec.algorithm.turn_credit is TurnCredit.TURN:
            turns = [_turns(rollout, reward) for (_, rollout, _), reward in zip(scored, rewards, strict=True)]
        responses = Responses([judged.group_id for judged, _, _ in scored], rewards, masks, turns=turns)
        advantages = estimate(responses, spec.algorithm).advantages
    wants_versions = spec.algorithm.proximal_policy is ProximalPolicy.INTERPOLATED
    return [
        Sequence(
            tokens=np.concatenate([judged.scored.group.prompt_tokens, rollout.tokens]),
            prompt_len=len(judged.scored.group.prompt_tokens),
            inference_logprobs=rollout.logprobs,
            advantage=advantage,
            loss_mask=mask,
            group_id=judged.group_id,
            reward=reward,
            versions=rollout.token_versions if wants_versions else None,
        )
        for (judged, rollout, _), reward, mask, advantage in zip(scored, rewards, masks, advantages, strict=True)
        if rollout.token_ids
    ]


def _loss_mask(rollout: Rollout, spec: JobSpec) -> BoolArray:
    """What the policy sampled, unless the rollout was cut and such are left out."""
    counts = not (spec.algorithm.mask_truncated and rollout.finish_reason.truncated)
    return rollout.sampled & counts


def _turns(rollout: Rollout, reward: float) -> Turns:
    if not rollout.turns:
        return Turns([len(rollout.tokens)], [reward])
    rewards = [turn.reward or 0.0 for turn in rollout.turns]
    rewards[-1] += reward
    return Turns([turn.observed + turn.sampled for turn in rollout.turns], rewards)


def _length_penalty(rollout: Rollout, spec: JobSpec) -> float:
    algorithm = spec.algorithm
    if not algorithm.overlong_buffer_enable:
        return 0.0
    return overlong_penalty(
        rollout.sampled_tokens, rollout_max_tokens=spec.rollout.rollout_max_tokens, overlong_buffer=algorithm.overlong_buffer,
        penalty_factor=algorithm.overlong_buffer_penalty_factor,
    )  # fmt: skip
