"""Rubric: a weighted sum of other scorers' rewards.

Rubrics may be parts of rubrics. Since sums of sums are sums, each is written out in advance over the scorers at its leaves, every one of
which then judges a group once:  outer = 1·inner + 1·format,  inner = 2·math + 1·format   ──►   outer = 2·math + 2·format.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass
from graphlib import TopologicalSorter

from services.common.spec.reward import RubricSpec
from services.common.streams.types import RolloutGroup, Verdict, VerdictStatus
from services.reward.pool.messages import MAX_DETAIL_CHARS, clean
from services.reward.scorers.base import Scorers, failed

DIGITS = 12
"""Decimal places of the sums: 0.1 + 0.2 and 0.3 are the same reward, and the same accuracy to dynamic sampling."""


@dataclass(frozen=True, slots=True)
class Shares:
    """A rubric written out: scorer → its weight. Example: Shares(reward={"math": 2.0, "format": 1.0}, accuracy={"math": 1.0})."""

    reward: Mapping[str, float]
    accuracy: Mapping[str, float]
    """They add up to 1."""


class Rubric:
    """A rubric of a job."""

    def __init__(self, name: str, shares: Shares, scorers: Scorers) -> None:
        """`scorers`: those that have a share, at least."""
        self._name, self._shares = name, shares
        self._parts = {part: scorers[part] for part in shares.reward}

    async def score(self, group: RolloutGroup) -> list[Verdict]:
        """One verdict per rollout, from those of all parts, which judge at the same time. Raises VerifierError as they do."""
        judging = [asyncio.create_task(scorer.score(group)) for scorer in self._parts.values()]
        try:
            columns = await asyncio.gather(*judging)
        finally:
            for task in judging:
                task.cancel()  # does nothing to those that are done
        rows = zip(*columns, strict=True)
        return [combined(self._name, self._shares, dict(zip(self._parts, row, strict=True))) for row in rows]


def combined(name: str, shares: Shares, verdicts: Mapping[str, Verdict]) -> Verdict:
    """The rubric's verdict. A part that failed fails it; a part beyond its limit makes it a TIMEOUT with accuracy 0."""
    for part, verdict in verdicts.items():
        if verdict.status is VerdictStatus.FAILED:
            return failed(name, f"{part} failed: {verdict.detail}")
    late = any(verdict.status is VerdictStatus.TIMEOUT for verdict in verdicts.values())
    status = VerdictStatus.TIMEOUT if late else VerdictStatus.SCORED
    detail = _detail(shares, verdicts)
    rewards = {part: verdict.reward for part, verdict in verdicts.items() if verdict.reward is not None}
    if len(rewards) < len(verdicts):
        return Verdict(status, None, None, name, detail)
    reward = _sum(shares.reward, rewards)
    if not math.isfinite(reward):
        return failed(name, f"the sum of its rewards is {reward}: {detail}")
    accuracies = {part: verdict.accuracy or 0.0 for part, verdict in verdicts.items()}
    accuracy = 0.0 if late else min(1.0, _sum(shares.accuracy, accuracies))
    return Verdict(status, reward, accuracy, name, detail)


def written_out(rubrics: Mapping[str, RubricSpec]) -> dict[str, Shares]:
    """Every rubric over the scorers at its leaves. The rubrics have no cycle (`RewardSpec` sees to it)."""
    graph = {name: set(rubric.verifier_function) & rubrics.keys() for name, rubric in rubrics.items()}
    done: dict[str, Shares] = {}
    for name in TopologicalSorter(graph).static_order():
        done[name] = _write_out(rubrics[name], done)
    return done


def _write_out(rubric: RubricSpec, done: Mapping[str, Shares]) -> Shares:
    weights = dict(zip(rubric.verifier_function, rubric.verifier_weight, strict=True))
    parts = {name: done.get(name, Shares({name: 1.0}, {name: 1.0})) for name in weights}
    total = math.fsum(weights.values())
    accurate = {name: weight / total for name, weight in weights.items()}
    if rubric.accuracy_of is not None:
        accurate = {rubric.accuracy_of: 1.0}
    reward: dict[str, float] = {}
    accuracy: dict[str, float] = {}
    for name, weight in weights.items():
        for leaf, share in parts[name].reward.items():
            reward[leaf] = reward.get(leaf, 0.0) + weight * share
    for name, weight in accurate.items():
        for leaf, share in parts[name].accuracy.items():
            accuracy[leaf] = accuracy.get(leaf, 0.0) + weight * share
    return Shares(reward, accuracy)


def _sum(shares: Mapping[str, float], values: Mapping[str, float]) -> float:
    return round(math.fsum(share * values[part] for part, share in shares.items()), DIGITS)


def _detail(shares: Shares, verdicts: Mapping[str, Verdict]) -> str:
    """Each part's reward, weight, accuracy and own words, for people, an equal room for each."""
    room = MAX_DETAIL_CHARS // len(verdicts) - 2
    return clean("; ".join(_part(part, shares.reward[part], each)[:room] for part, each in verdicts.items()))


def _part(name: str, weight: float, verdict: Verdict) -> str:
    if verdict.reward is None:
        return f"{name}: {verdict.status} ({verdict.detail})"
    late = "" if verdict.status is VerdictStatus.SCORED else f" {verdict.status},"
    return f"{name}:{late} {verdict.reward:.4g} × {weight:.4g}, accuracy {verdict.accuracy:.3g} ({verdict.detail})"
