"""Held-out evaluation: avg@k and pass@k through the same rollout servers, labelled with the policy versions that answered."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from statistics import fmean

from services.common.types import ScoredGroup, VerdictStatus

SOLVED = 0.999
"""An accuracy from here on counts as solved in pass@k."""


@dataclass(slots=True)
class EvalRound:
    """One evaluation under way: every held-out task once."""

    step: int
    """Learner step at which it was asked for."""
    policy_version: int
    """The oldest version that may answer."""
    first_id: int
    """Group ids of this round are first_id … first_id + tasks − 1."""
    tasks: int
    samples: int
    deadline: float
    """Monotonic seconds at which it ends with what it has."""
    answers: dict[int, ScoredGroup] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    @property
    def done(self) -> bool:
        """Whether every task was answered, or its time is over."""
        return len(self.answers) >= self.tasks or time.monotonic() > self.deadline

    def arrived(self, scored: ScoredGroup) -> None:
        """Takes an answer; one of another round is ignored."""
        if 0 <= scored.group.task.group_id - self.first_id < self.tasks:
            self.answers.setdefault(scored.group.task.group_id, scored)

    def result(self) -> dict[str, object]:
        """The evaluation as `GET /jobs/{id}/metrics` shows it.

        `avg_at_k` is the mean accuracy over all judged rollouts; a task counts in `pass_at_k` when one of its rollouts is right. Tasks that
        failed or did not come back in time are counted in `unanswered`, and in neither figure.
        """
        judged = {gid: scores for gid, scored in self.answers.items() if (scores := _accuracies(scored))}
        groups = [self.answers[gid].group for gid in judged]
        return {
            "step": self.step,
            "k": self.samples,
            "tasks": len(judged),
            "unanswered": self.tasks - len(judged),
            "avg_at_k": fmean(a for scores in judged.values() for a in scores) if judged else None,
            "pass_at_k": fmean(max(scores) >= SOLVED for scores in judged.values()) if judged else None,
            "min_policy_version": min((g.min_policy_version for g in groups), default=None),
            "max_policy_version": max((g.max_policy_version for g in groups), default=None),
            "seconds": round(time.monotonic() - self.started, 3),
            "at": time.time(),
        }


def _accuracies(scored: ScoredGroup) -> list[float]:
    return [v.accuracy for v in scored.verdicts if v.status is VerdictStatus.SCORED and v.accuracy is not None]
