"""Scorer of episodes: what the environment said at the end is the verdict."""

from __future__ import annotations

from services.common.streams.types import Rollout, RolloutGroup, Verdict, VerdictStatus
from services.reward import metrics
from services.reward.pool.messages import clean
from services.reward.scorers.base import failed


class OutcomeScorer:
    """The environments' own rewards."""

    def __init__(self, name: str) -> None:
        self._name = name

    async def score(self, group: RolloutGroup) -> list[Verdict]:
        """One verdict per rollout. An episode that did not come to its end has reward 0: a failed one is not in the group."""
        verdicts = [self._verdict(rollout) for rollout in group.rollouts]
        for verdict in verdicts:
            metrics.observe_verdict(verdict.status, self._name)
        return verdicts

    def _verdict(self, rollout: Rollout) -> Verdict:
        if not rollout.turns:
            return failed(self._name, "the rollout is no episode: its task has no environment")
        if (outcome := rollout.outcome) is None:
            return Verdict(VerdictStatus.SCORED, 0.0, 0.0, self._name, f"not over after {len(rollout.turns)} turns")
        return Verdict(VerdictStatus.SCORED, outcome.reward, outcome.accuracy, self._name, clean(outcome.detail))
