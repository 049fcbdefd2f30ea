"""Buffer of judged groups: from the issue of a group to its fate, and the choice of the next step's groups. Without I/O.

issue_budget ──► issued ──► in flight ──► arrived ──► ready ──► select ──► trained
                               │  ▲          ├──► degenerate
                               │  └ attempt ◄┼──► failed
                               └──► failed   └──► stale
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from services.common.jobs.fates import Fate
from services.common.spec.choices import FilterMetric
from services.common.spec.job import JobSpec
from services.common.streams.consumer import Entry
from services.common.streams.types import ScoredGroup, VerdictStatus
from services.learner.algorithms.advantages import is_degenerate
from services.learner.groups.failures import FailureRun
from services.learner.groups.ledger import ActiveGroup, Ledger, Settled
from services.learner.groups.off_policy import AcceptRate, issue_budget, select_batch
from services.learner.groups.validate import Limits, rejection_reason

HOPELESS_REFILLS = 2
"""After so many times `filter_groups_max_batches` batches judged without an informative group, no step is possible."""
HOPELESS_GROUPS = 256
"""Never after fewer groups: at an accept rate of 3 %, one in 2,400 runs of this length has no informative group."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A scored group from the stream, with the entry that must be acked once it is journalled."""

    scored: ScoredGroup
    payload: bytes
    entry: Entry | None
    """None when the group comes from the journal."""

    @property
    def group_id(self) -> int:
        """Ordinal within the job."""
        return self.scored.group.task.group_id

    @property
    def rewards(self) -> list[float]:
        """Rewards of the judged rollouts."""
        return [verdict.reward for verdict in self.scored.verdicts if verdict.reward is not None]

    @property
    def accuracies(self) -> list[float]:
        """Accuracies of the judged rollouts."""
        return [verdict.accuracy for verdict in self.scored.verdicts if verdict.accuracy is not None]

    @property
    def over_limit(self) -> int:
        """Number of rollouts that count as wrong because their check exceeded its limit."""
        return sum(v.status is VerdictStatus.TIMEOUT and v.accuracy is not None for v in self.scored.verdicts)

    @property
    def all_over_limit(self) -> str:
        """A message when every check exceeded its limit, as with a verifier that hangs; otherwise empty."""
        verdicts = self.scored.verdicts
        if not verdicts or self.over_limit < len(verdicts):
            return ""
        return f"all {len(verdicts)} checks went beyond their limit: {verdicts[0].detail}"


class GroupBuffer:
    """Groups between issue and fate. `ledger` may hold active groups of an earlier run."""

    def __init__(
        self, spec: JobSpec, limits: Limits, ledger: Ledger, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.ledger = ledger
        self.accept_rate = AcceptRate()
        self.failures = FailureRun(spec.slots, clock)
        self.judged_since_step = 0
        self.step_under_way = False
        """A step has taken its groups and is not published yet: it still occupies its slots."""
        self.closed = False
        """The job ends: no group is issued or accepted any more."""
        self._spec, self._limits, self._clock = spec, limits, clock
        self._ready: dict[int, Judged] = {}
        self._oldest_version = math.inf
        """No ready group has a token of an older version."""
        self._failed: dict[int, list[Judged]] = {}
        self._settled: list[Judged] = []
        self._degenerate_since_step = 0

    @property
    def ready(self) -> int:
        """Number of informative groups that wait for a step."""
        return len(self._ready)

    def budget(self, steps_left: int) -> int:
        """Number of groups that may be issued now, with `steps_left` steps not yet published."""
        if self.closed:
            return 0
        per_step = self._spec.algorithm.groups_per_step
        return issue_budget(
            active=len(self.ledger.active), ready=self.ready, groups_per_step=per_step,
            max_off_policy_steps=self._spec.off_policy.max_off_policy_steps, accept_rate=self.accept_rate.value,
            still_needed=(steps_left - self.step_under_way) * per_step, step_under_way=self.step_under_way,
        )  # fmt: skip

    def arrived(self, judged: Judged) -> Fate | None:
        """Accepts a scored group; returns its fate, or None if it is ready. A repeated or settled group changes nothing.

        An ordinal that this ledger has not issued yet was issued before a crash, after the last journal record: it becomes active again.
        So do the ordinals below it, issued at the same version or, while that record's step was under way, at the version before.
        """
        if self.closed:
            return None
        if self.ledger.issued <= judged.group_id < self.ledger.issued + self._spec.slots:
            self.ledger.reissue(judged.group_id + 1, max(0, judged.scored.group.task.min_policy_version - 1))
        active = self.ledger.active.get(judged.group_id)
        if active is None or active.ready:
            if not self._is_redelivery(judged):
                self._settled.append(judged)
            return None
        if judged.scored.group.failure is not None and not judged.scored.group.permanent:
            self._fail_attempt(active, judged, judged.scored.group.failure)
            return None
        fate, reason = self._judge(judged)
        self.judged_since_step += 1
        if fate is None or fate is Fate.DEGENERATE:
            self.accept_rate.update(fate is None)
            self._degenerate_since_step += fate is Fate.DEGENERATE
        if trouble := reason or judged.all_over_limit:
            self.failures.add(trouble)
        else:
            self.failures.clear()
        if fate is None:
            active.ready = True
            self._ready[judged.group_id] = judged
            self._oldest_version = min(self._oldest_version, judged.scored.group.min_policy_version)
        else:
            self.settle(judged, fate, reason)
        return fate

    def settle(self, judged: Judged, fate: Fate, reason: str = "") -> None:
        """Ends a group; its entries, also those of failed attempts, are acked with the next journal record."""
        self._ready.pop(judged.group_id, None)
        self.ledger.settle(judged.group_id, fate, reason)
        self._settled += [*self._failed.pop(judged.group_id, []), judged]

    def give_up(self, group: ActiveGroup, reason: str, *, counts: bool = True) -> None:
        """Ends an active group whose last attempt has failed, or whose task could not be made.

        `counts`: the failure counts against the job; False when no server was there to answer.
        """
        self.ledger.settle(group.group_id, Fate.FAILED, reason)
        self._settled += self._failed.pop(group.group_id, [])
        if counts:
            self.failures.add(reason)

    def select(self, policy_version: int) -> list[Judged] | None:
        """The groups of the next step, oldest first, or None while it has to wait. They stay ready until `settle`."""
        bound = self._spec.off_policy.max_off_policy_steps
        per_step, partial = self._spec.algorithm.groups_per_step, self.judged_since_step >= self._refills
        if self.ready < per_step and not partial and policy_version - self._oldest_version <= bound:
            return None  # asked after every arrival, with thousands of groups in flight
        ages = {gid: policy_version - j.scored.group.min_policy_version for gid, j in self._ready.items()}
        for group_id, age in ages.items():
            if age > bound:
                reason = f"policy_age {age} exceeds max_off_policy_steps {bound}"
                self.settle(self._ready[group_id], Fate.STALE, reason)
        ready = {group_id: ages[group_id] for group_id in self._ready}
        in_flight = [policy_version - g.issue_version for g in self.ledger.active.values() if not g.ready]
        self._oldest_version = policy_version - max(ready.values(), default=-math.inf)
        chosen = select_batch(ready, in_flight, groups_per_step=per_step, max_off_policy_steps=bound, partial=partial)
        return None if chosen is None else [self._ready[group_id] for group_id in chosen]

    def begin_training(self, groups: list[Judged]) -> None:
        """Gives the groups of a step their fate; they occupy their slots until `published`."""
        for judged in groups:
            self.settle(judged, Fate.TRAINED)
        self.step_under_way = True
        self.judged_since_step = self._degenerate_since_step = 0

    @property
    def stall_reason(self) -> str:
        """Why the next step cannot begin: failures in a row, or refills without an informative group; empty when it can."""
        return self._obstacle(failing=self.failures.stalled, degenerate=self._refills)

    @property
    def no_step_reason(self) -> str:
        """The same when it has lasted so long that no step is possible."""
        degenerate = max(HOPELESS_REFILLS * self._refills, HOPELESS_GROUPS)
        return self._obstacle(failing=self.failures.hopeless, degenerate=degenerate)

    def published(self) -> None:
        """Frees the slots of the step, whose weights are published."""
        self.step_under_way = False

    def cancel_all(self, reason: str) -> None:
        """Ends all remaining groups with the job, and accepts no others."""
        self.closed = True
        self._ready.clear()
        self._failed.clear()
        for group_id in list(self.ledger.active):
            self.ledger.settle(group_id, Fate.CANCELLED, reason)

    def overdue(self) -> list[ActiveGroup]:
        """Groups whose attempt failed, or has passed its deadline."""
        limit = self._clock() - self._spec.rollout.group_timeout_s
        waiting = [group for group in self.ledger.active.values() if not group.ready]
        return [group for group in waiting if group.failure or group.issued_at < limit]

    def take_for_record(self) -> tuple[tuple[Settled, ...], list[Entry]]:
        """Fates that no journal record has, for the next one, and the entries to ack once it is written.

        Both are of one moment: an entry never goes before a record has its fate.
        """
        return tuple(self.ledger.take_unwritten()), [
            item.entry for item in self.take_settled() if item.entry is not None
        ]

    def take_settled(self) -> list[Judged]:
        """Groups settled since the last call; their entries may be acked once the journal has their fates."""
        settled, self._settled = self._settled, []
        return settled

    def _fail_attempt(self, active: ActiveGroup, judged: Judged, reason: str) -> None:
        """Records it for `overdue`. The entry is held until the group has a fate, so that a restart reads it again."""
        self._failed.setdefault(judged.group_id, []).append(judged)
        attempt = judged.scored.group.task.attempt
        if attempt >= active.attempt:
            active.attempt, active.failure = attempt, reason

    def _is_redelivery(self, judged: Judged) -> bool:
        """Whether a ready group has this same entry: it must not be acked before the journal has the group."""
        held = self._ready.get(judged.group_id)
        if held is None or held.entry is None or judged.entry is None:
            return False
        return held.entry.id == judged.entry.id

    @property
    def _refills(self) -> int:
        """Groups that dynamic sampling may judge for one step: `filter_groups_max_batches` batches."""
        algorithm = self._spec.algorithm
        return algorithm.filter_groups_max_batches * algorithm.groups_per_step

    def _obstacle(self, *, failing: bool, degenerate: int) -> str:
        if failing:
            return str(self.failures)
        count, metric = self._degenerate_since_step, self._spec.algorithm.filter_groups_metric
        if count < degenerate or self._ready:
            return ""
        return f"{count} groups were judged for one step and none was informative: each had equal {metric}"

    def _judge(self, judged: Judged) -> tuple[Fate | None, str]:
        if reason := rejection_reason(judged.scored, self._spec, self._limits):
            return Fate.FAILED, reason
        algorithm = self._spec.algorithm
        # Rewards are the verifier's own: with length shaping every group would seem informative.
        compared = judged.accuracies if algorithm.filter_groups_metric is FilterMetric.ACCURACY else judged.rewards
        degenerate = algorithm.filter_groups_enable and is_degenerate(compared)
        return Fate.DEGENERATE if degenerate else None, ""
