"""Judging of one group: from its rollouts to its verdicts."""

from __future__ import annotations

import time
from dataclasses import replace

from services.common.config.verifiers import choose_verifier
from services.common.errors import ConfigError
from services.common.spec.rollout import RewardSpec
from services.common.streams.types import RolloutGroup, ScoredGroup, Verdict, VerdictStatus
from services.reward import metrics
from services.reward.pool.messages import Check
from services.reward.pool.pool import Pool

NO_VERIFIER = "none"
"""Verifier name in a verdict where no verifier could be chosen."""


async def judge_group(pool: Pool, group: RolloutGroup, spec: RewardSpec) -> ScoredGroup:
    """The group with one verdict per rollout; a group that could not be sampled passes with none.

    Where there is no verifier for the task every verdict is FAILED, with the reason: the group still reaches the learner.

    Raises:
        VerifierError: the pool has failed.
    """
    if group.failure is not None and not group.rollouts:
        return ScoredGroup(group, (), 0.0)
    began, task = time.monotonic(), group.task
    try:
        name = choose_verifier(task.data_source, spec.verifiers)
    except ConfigError as error:
        verdicts = [_failed(str(error)) for _ in group.rollouts]
    else:
        row = task.ground_truth, task.data_source, task.extra_info
        limits = spec.timeout_s, spec.memory_mib, spec.max_chars
        verdicts = await pool.judge([Check(name, rollout.text, *row, *limits) for rollout in group.rollouts])
    return ScoredGroup(group, tuple(verdicts), time.monotonic() - began)


def without_text(scored: ScoredGroup) -> ScoredGroup:
    """The group as the learner receives it: it needs tokens, not text."""
    rollouts = tuple(replace(rollout, text="") for rollout in scored.group.rollouts)
    return replace(scored, group=replace(scored.group, rollouts=rollouts))


def _failed(reason: str) -> Verdict:
    metrics.observe_verdict(VerdictStatus.FAILED, NO_VERIFIER)
    return Verdict(VerdictStatus.FAILED, None, None, NO_VERIFIER, reason[:400])
