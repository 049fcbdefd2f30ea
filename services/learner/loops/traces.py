"""Traces of the job's groups, from issue to fate, for OpenTelemetry (`services.common.service.tracing`). Costs nothing where it is off.

issue ── issued ──► collect ── arrived ──► train ── settled, trained ──► spans `group` and `train`
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from services.common.jobs.fates import Fate
from services.common.service.tracing import GROUP, GroupSpan, is_tracing, trace
from services.learner.groups.buffer import Judged
from services.learner.groups.ledger import Settled


@dataclass(slots=True)
class _Way:
    """What is known of an active group."""

    job_id: str
    issued_at: float
    """Unix seconds; of a group that this head has not issued, when its sampling began."""
    attempt: int = 1
    server: str = ""
    rollouts: int = 0
    tokens: int = 0
    reward_mean: float | None = None


class GroupTraces:
    """The ways of the groups of one job that have no fate yet."""

    def __init__(self) -> None:
        self._ways: dict[int, _Way] = {}

    def issued(self, job_id: str, group_id: int) -> None:
        """A group was issued."""
        if is_tracing():
            self._ways.setdefault(group_id, _Way(job_id, time.time()))

    def arrived(self, judged: Judged) -> None:
        """A group came back from the reward service."""
        if not is_tracing():
            return
        group, rewards = judged.scored.group, judged.rewards
        began = time.time() - judged.scored.judge_s - group.generate_s
        way = self._ways.setdefault(judged.group_id, _Way(group.task.job_id, began))
        way.attempt, way.server, way.rollouts = group.task.attempt, group.server, len(group.rollouts)
        way.tokens = group.sampled_tokens
        way.reward_mean = sum(rewards) / len(rewards) if rewards else None

    def settled(self, fates: Iterable[Settled], lineage: int) -> None:
        """These groups have a fate that the journal has; those that are trained get their span after the step."""
        for item in fates:
            if item.fate is not Fate.TRAINED and (way := self._ways.pop(item.group_id, None)) is not None:
                self._group(item.group_id, way, item.fate, lineage=lineage, reason=item.reason)

    def trained(self, group_ids: Iterable[int], *, step: int, lineage: int, began: float) -> None:
        """A step has trained these groups, from `began` (Unix seconds) until now, and its version is published."""
        for group_id in group_ids:
            if (way := self._ways.pop(group_id, None)) is not None:
                about = {"step": step, "lineage": lineage}
                trace(GroupSpan("train", way.job_id, group_id, began, time.time(), about))
                self._group(group_id, way, Fate.TRAINED, step=step, lineage=lineage)

    def _group(self, group_id: int, way: _Way, fate: Fate, *, reason: str = "", **about: int) -> None:
        attributes: dict[str, str | int | float | bool] = {
            "fate": fate.value, "attempt": way.attempt, "server": way.server, "rollouts": way.rollouts, "tokens": way.tokens, **about,
        }  # fmt: skip
        if reason:
            attributes["reason"] = reason
        if way.reward_mean is not None:
            attributes["reward_mean"] = way.reward_mean
        error = (reason or fate.value) if fate is Fate.FAILED else ""
        trace(GroupSpan(GROUP, way.job_id, group_id, way.issued_at, time.time(), attributes, error))
