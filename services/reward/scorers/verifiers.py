"""Scorer of one verifier: its checks run in the job's pool of processes."""

from __future__ import annotations

from services.common.spec.reward import RewardSpec
from services.common.streams.types import RolloutGroup, Verdict
from services.reward.pool.messages import Check
from services.reward.pool.pool import Pool


class VerifierScorer:
    """A verifier, built in or installed, with the job's settings and limits."""

    def __init__(self, name: str, pool: Pool, spec: RewardSpec) -> None:
        """`pool`: the job's, opened and closed by its owner."""
        self._name, self._pool, self._spec = name, pool, spec

    async def score(self, group: RolloutGroup) -> list[Verdict]:
        """One verdict per rollout. Raises VerifierError when the pool has failed."""
        task, spec = group.task, self._spec
        extra_info = {**spec.config.get(self._name, {}), **task.extra_info}
        row = task.ground_truth, task.data_source, extra_info
        limits = spec.timeout_s, spec.memory_mib, spec.max_chars
        return await self._pool.judge([Check(self._name, rollout.text, *row, *limits) for rollout in group.rollouts])
