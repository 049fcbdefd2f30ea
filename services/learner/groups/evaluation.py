"""Evaluation on held-out tasks: avg@k and pass@k by the same rollout servers, with the policy versions that answered."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev

from services.learner.groups.buffer import Judged

SOLVED = 0.999
"""An accuracy from here on counts as solved in pass@k."""


@dataclass(slots=True)
class EvalRound:
    """One evaluation under way: every held-out task once."""

    step: int
    """Learner step at which it began, and the oldest policy version that may answer."""
    first_id: int
    """Group ids are first_id … first_id + tasks − 1."""
    tasks: int
    samples: int
    deadline: float
    """Monotonic seconds at which it ends, complete or not."""
    started: float = field(default_factory=time.monotonic)
    not_sent: dict[int, str] = field(default_factory=dict)
    """Reasons why tasks could not be sent, by group id: no server will answer them."""

    @property
    def group_ids(self) -> range:
        """Group ids of this round."""
        return range(self.first_id, self.first_id + self.tasks)

    def done(self, answers: Mapping[int, Judged]) -> bool:
        """Whether every task was answered, or the deadline has passed."""
        complete = all(group_id in answers or group_id in self.not_sent for group_id in self.group_ids)
        return complete or time.monotonic() > self.deadline

    def failure(self, answers: Mapping[int, Judged]) -> str:
        """Why none of its tasks could be judged; empty when one was."""
        answered = [answers[group_id] for group_id in self.group_ids if group_id in answers]
        if any(answer.accuracies for answer in answered):
            return ""
        cause = f"none of {self.tasks} held-out tasks could be judged"
        if not answered:
            timeout = f"no answer within {self.deadline - self.started:.0f} s"
            return f"{cause}: {next(iter(self.not_sent.values()), timeout)}"
        newest = answered[-1].scored
        details = [verdict.detail for verdict in newest.verdicts if verdict.detail]
        return f"{cause}; the newest: {newest.group.failure or next(iter(details), 'without a verdict')}"

    def result(self, answers: Mapping[int, Judged]) -> dict[str, object]:
        """The evaluation as `GET /jobs/{id}/metrics` shows it.

        `avg_at_k` is the mean over tasks of each task's mean accuracy, so that a task with few verdicts weighs as much as any other; a
        task counts in `pass_at_k` when one of its rollouts is right. Tasks that failed or did not come back in time are counted in
        `unanswered`, and in neither figure. Of all rollouts requested, also those of unanswered tasks, `rollouts_judged` have a verdict
        and `rollouts_not_judged` have none; `checks_over_limit` of the judged ones count as wrong because their check exceeded a limit.
        `avg_at_k_se` and `pass_at_k_se` are standard errors over the tasks, as if these were drawn at random; None of fewer than two.
        """
        answered = [answers[group_id] for group_id in self.group_ids if group_id in answers]
        judged = [answer for answer in answered if answer.accuracies]
        verdicts = sum(len(answer.accuracies) for answer in judged)
        groups = [answer.scored.group for answer in judged]
        averages = [fmean(answer.accuracies) for answer in judged]
        passes = [float(max(answer.accuracies) >= SOLVED) for answer in judged]
        return {
            "step": self.step,
            "k": self.samples,
            "tasks": len(judged),
            "unanswered": self.tasks - len(judged),
            "rollouts_judged": verdicts,
            "rollouts_not_judged": self.tasks * self.samples - verdicts,
            "checks_over_limit": sum(answer.over_limit for answer in judged),
            "avg_at_k": fmean(averages) if judged else None,
            "avg_at_k_se": standard_error(averages),
            "pass_at_k": fmean(passes) if judged else None,
            "pass_at_k_se": standard_error(passes),
            "min_policy_version": min((g.min_policy_version for g in groups), default=None),
            "max_policy_version": max((g.max_policy_version for g in groups), default=None),
            "seconds": round(time.monotonic() - self.started, 3),
            "at": time.time(),
        }


def standard_error(values: Sequence[float]) -> float | None:
    """Standard error of the mean of independent values; None of fewer than two."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
