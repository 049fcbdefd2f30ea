"""One group: from its rollouts to its verdicts."""

from __future__ import annotations

import time
from dataclasses import replace

from services.common.config.verifiers import choose
from services.common.errors import ConfigError
from services.common.spec.rollout import RewardSpec
from services.common.streams.types import Rollout, RolloutGroup, ScoredGroup, Verdict, VerdictStatus
from services.reward import metrics
from services.reward.pool.messages import Check
from services.reward.pool.pool import Pool

NO_VERIFIER = "none"
"""What a verdict says where no verifier could be chosen."""


async def judge_group(pool: Pool, group: RolloutGroup, spec: RewardSpec) -> ScoredGroup:
    """The group with one verdict per rollout; a group that failed before passes with none.

    Where there is no verifier for the task every verdict is FAILED, with the reason: the group still reaches its fate.

    Raises:
        VerifierError: the pool has failed.
    """
    began = time.monotonic()
    try:
        name = choose(group.task.data_source, spec.verifiers)
    except ConfigError as error:
        verdicts = [_unjudged(str(error)) for _ in group.rollouts]
    else:
        verdicts = await pool.judge([_check(name, group, rollout, spec) for rollout in group.rollouts])
    return ScoredGroup(group, tuple(verdicts), time.monotonic() - began)


def without_text(scored: ScoredGroup) -> ScoredGroup:
    """As the learner gets it: it needs tokens, not text."""
    rollouts = tuple(replace(rollout, text="") for rollout in scored.group.rollouts)
    return replace(scored, group=replace(scored.group, rollouts=rollouts))


def _check(name: str, group: RolloutGroup, rollout: Rollout, spec: RewardSpec) -> Check:
    task = group.task
    return Check(
        name, rollout.text, task.ground_truth, task.data_source, task.extra_info, spec.timeout_s, spec.memory_mib, spec.max_chars
    )  # fmt: skip


def _unjudged(reason: str) -> Verdict:
    metrics.observe_verdict(VerdictStatus.FAILED, NO_VERIFIER)
    return Verdict(VerdictStatus.FAILED, None, None, NO_VERIFIER, reason[:400])
