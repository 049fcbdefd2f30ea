"""What was issued, what came back, and what may train next. No I/O: the head's loops ask and tell.

issue_budget ──► issued ──► in flight ──► arrived ──► ready ──► select ──► trained
                               │  ▲          ├──► degenerate
                               │  └ attempt ◄┼──► failed
                               └──► failed   └──► stale
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from services.common.consumer import Entry
from services.common.fates import Fate
from services.common.spec import JobSpec
from services.common.types import ScoredGroup, VerdictStatus
from services.learner.algorithms.dynamic_sampling import filter_values, is_degenerate
from services.learner.failures import FailureRun
from services.learner.fitness import Limits, unfit
from services.learner.gate import AcceptRate, ReadyGroup, issue_budget, select_batch
from services.learner.ledger import ActiveGroup, Ledger, Settled

HOPELESS_REFILLS = 2
"""Times `filter_groups_max_batches` batches that are judged without an informative group before no step is possible."""
HOPELESS_GROUPS = 256
"""And so many groups at the least: at an accept rate of 3 %, one in 2,400 such runs would have none."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A scored group as it came off the stream, with the entry that must be acked once it is journalled."""

    scored: ScoredGroup
    payload: bytes
    entry: Entry | None
    """None when it was replayed from the journal."""

    @property
    def group_id(self) -> int:
        """Ordinal within the job."""
        return self.scored.group.task.group_id

    @property
    def rewards(self) -> list[float]:
        """Rewards of the rollouts that were judged."""
        return [verdict.reward for verdict in self.scored.verdicts if verdict.reward is not None]

    @property
    def accuracies(self) -> list[float]:
        """Accuracies of the rollouts that were judged."""
        return [verdict.accuracy for verdict in self.scored.verdicts if verdict.accuracy is not None]

    @property
    def over_limit(self) -> int:
        """Rollouts whose check went beyond its limit, and that count as wrong for it."""
        return sum(v.status is VerdictStatus.TIMEOUT and v.accuracy is not None for v in self.scored.verdicts)

    @property
    def all_over_limit(self) -> str:
        """In words, that every check went beyond its limit, as with a verifier that hangs; empty when one did not."""
        verdicts = self.scored.verdicts
        if not verdicts or self.over_limit < len(verdicts):
            return ""
        return f"all {len(verdicts)} checks went beyond their limit: {verdicts[0].detail}"


class Intake:
    """Groups between issue and fate."""

    def __init__(
        self, spec: JobSpec, limits: Limits, ledger: Ledger, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Starts from a ledger that may hold active groups of an earlier run."""
        self.ledger = ledger
        self.accept_rate = AcceptRate()
        self.failures = FailureRun(spec.slots, clock)
        self.judged_since_step = 0
        self.step_under_way = False
        """A step has taken its groups and is not published yet: its slots are still taken."""
        self.closed = False
        """The job ends: nothing is issued or taken in any more."""
        self._spec = spec
        self._limits = limits
        self._clock = clock
        self._ready: dict[int, Judged] = {}
        self._failed: dict[int, list[Judged]] = {}
        self._settled: list[Judged] = []
        self._degenerate_since_step = 0

    @property
    def ready(self) -> int:
        """Informative groups that wait for a step."""
        return len(self._ready)

    def budget(self, steps_left: int) -> int:
        """How many groups may be issued now, with `steps_left` steps not yet published."""
        if self.closed:
            return 0
        per_step = self._spec.algorithm.groups_per_step
        return issue_budget(
            active=len(self.ledger.active), ready=self.ready, groups_per_step=per_step,
            max_off_policy_steps=self._spec.off_policy.max_off_policy_steps, accept_rate=self.accept_rate.value,
            still_needed=(steps_left - self.step_under_way) * per_step, step_under_way=self.step_under_way,
        )  # fmt: skip

    def arrived(self, judged: Judged) -> Fate | None:
        """Takes in a scored group; its fate if it ended here, None if it is ready. A repeated or settled group changes nothing.

        An ordinal that this ledger has not issued yet was issued before a crash, after the last journal record: it is active again. So are
        those below it, which were issued at the same version or, while that record's step was under way, at the one before.
        """
        if self.closed:
            return None
        if self.ledger.issued <= judged.group_id < self.ledger.issued + self._spec.slots:
            self.ledger.reissue(judged.group_id + 1, max(0, judged.scored.group.task.min_policy_version - 1))
        active = self.ledger.active.get(judged.group_id)
        if active is None or active.ready:
            if not self._holds(judged):
                self._settled.append(judged)
            return None
        if judged.scored.group.failure is not None and not judged.scored.group.permanent:
            self._attempt_failed(active, judged, judged.scored.group.failure)
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
        else:
            self.settle(judged, fate, reason)
        return fate

    def settle(self, judged: Judged, fate: Fate, reason: str = "") -> None:
        """Ends a group; its entries, those of attempts that failed too, are acked with the next journal record."""
        self._ready.pop(judged.group_id, None)
        self.ledger.settle(judged.group_id, fate, reason)
        self._settled += [*self._failed.pop(judged.group_id, []), judged]

    def give_up(self, group: ActiveGroup, reason: str, *, counts: bool = True) -> None:
        """Ends a group whose last attempt has failed, or whose task could not be made.

        Args:
            group: an active one.
            reason: why.
            counts: whether it says something about the job; not so when nobody was there to answer.
        """
        self.ledger.settle(group.group_id, Fate.FAILED, reason)
        self._settled += self._failed.pop(group.group_id, [])
        if counts:
            self.failures.add(reason)

    def select(self, policy_version: int) -> list[Judged] | None:
        """The groups of the next step, oldest first, or None while it has to wait. They stay ready until `settle`."""
        bound = self._spec.off_policy.max_off_policy_steps
        for judged in [j for j in self._ready.values() if policy_version - j.scored.group.min_policy_version > bound]:
            age = policy_version - judged.scored.group.min_policy_version
            self.settle(judged, Fate.STALE, f"policy_age {age} exceeds max_off_policy_steps {bound}")
        ready = [ReadyGroup(gid, policy_version - j.scored.group.min_policy_version) for gid, j in self._ready.items()]
        in_flight = [policy_version - g.issue_version for g in self.ledger.active.values() if not g.ready]
        per_step = self._spec.algorithm.groups_per_step
        chosen = select_batch(
            ready, in_flight, groups_per_step=per_step, max_off_policy_steps=bound, partial=self._refills_exhausted
        )
        return None if chosen is None else [self._ready[group.group_id] for group in chosen]

    def begin_training(self, groups: list[Judged]) -> None:
        """Gives the groups of a step their fate; their slots stay taken until `published`."""
        for judged in groups:
            self.settle(judged, Fate.TRAINED)
        self.step_under_way = True
        self.judged_since_step = self._degenerate_since_step = 0

    @property
    def fruitless(self) -> str:
        """What stands in the way of the next step: failures in a row, or refills without an informative group; empty when nothing does."""
        if self.failures.stalled:
            return str(self.failures)
        return self._no_informative if self._degenerate_since_step >= self._refills and not self._ready else ""

    @property
    def hopeless(self) -> str:
        """The same once it has gone on for so long that no step is possible."""
        if self.failures.hopeless:
            return str(self.failures)
        bound = max(HOPELESS_REFILLS * self._refills, HOPELESS_GROUPS)
        return self._no_informative if self._degenerate_since_step >= bound and not self._ready else ""

    def published(self) -> None:
        """The step's weights are out: its slots are free."""
        self.step_under_way = False

    def cancel_all(self, reason: str) -> None:
        """Ends every group that is left, with the job; from now on there are no others."""
        self.closed = True
        self._ready.clear()
        self._failed.clear()
        for group_id in list(self.ledger.active):
            self.ledger.settle(group_id, Fate.CANCELLED, reason)

    def overdue(self) -> list[ActiveGroup]:
        """Groups whose attempt failed, or is in flight beyond its deadline."""
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
        """Groups settled since the last call, whose entries may be acked once the journal has their fates."""
        settled, self._settled = self._settled, []
        return settled

    def _attempt_failed(self, active: ActiveGroup, judged: Judged, reason: str) -> None:
        """Notes it; the watch loop issues the group again. The entry stays until the group has a fate: a restart learns it again."""
        self._failed.setdefault(judged.group_id, []).append(judged)
        attempt = judged.scored.group.task.attempt
        if attempt >= active.attempt:
            active.attempt, active.failure = attempt, reason

    def _holds(self, judged: Judged) -> bool:
        """Whether the group waits with this very entry, delivered again: it must not be acked before the journal has the group."""
        held = self._ready.get(judged.group_id)
        return (
            held is not None
            and held.entry is not None
            and judged.entry is not None
            and held.entry.id == judged.entry.id
        )

    @property
    def _refills(self) -> int:
        """Groups that dynamic sampling may judge for one step: `filter_groups_max_batches` batches."""
        algorithm = self._spec.algorithm
        return algorithm.filter_groups_max_batches * algorithm.groups_per_step

    @property
    def _refills_exhausted(self) -> bool:
        return self.judged_since_step >= self._refills

    @property
    def _no_informative(self) -> str:
        metric = self._spec.algorithm.filter_groups_metric
        return f"{self._degenerate_since_step} groups were judged for one step and none was informative: each had equal {metric}"

    def _judge(self, judged: Judged) -> tuple[Fate | None, str]:
        unusable = unfit(judged.scored, self._spec, self._limits)
        if unusable:
            return Fate.FAILED, unusable
        algorithm = self._spec.algorithm
        values = filter_values(algorithm.filter_groups_metric, accuracies=judged.accuracies, rewards=judged.rewards)
        if algorithm.filter_groups_enable and is_degenerate(values):
            return Fate.DEGENERATE, ""
        return None, ""
