"""The off-policy gate: how many groups may be issued, and when a step may go. Pure.

B = groups_per_step, k = max_off_policy_steps. A group is active from its issue until it has a fate: in flight, then ready (informative and
waiting). It is trained on at `policy_age` = learner's version − its oldest token's version, which is at most its age since issue.

Two rules:

1. Slots: active groups, plus B for a step under way, never exceed (k + 1) · B. The step keeps its B slots until the version has risen,
   even if it trains fewer groups: what is issued meanwhile is sampled by the old version and ages at once.
2. Deadlines: a step may go if, for every age j from 0 to k, at most (k − j) · B active groups of age j or more are left behind, for a group
   of age j has k − j steps yet.

No group ever exceeds age k, and none waits for ever:

- With j = k: a step leaves no group of age k behind, so when the version rises by one, nobody reaches k + 1.
- The version's rise turns rule 2 into: at most (k − j + 1) · B groups of age ≥ j, for j ≥ 1; rule 1 says the same for j = 0.
- So once nothing is in flight, the B oldest are a step that may go; and with fewer than B ready, rule 1 leaves slots to issue into.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReadyGroup:
    """An informative group that waits for a step."""

    group_id: int
    """Its ordinal of issue."""
    policy_age: int
    """Learner's version − the oldest version that sampled a token of it."""


def issue_budget(
    *, active: int, ready: int, groups_per_step: int, max_off_policy_steps: int, accept_rate: float, still_needed: int,
    step_under_way: bool = False,
) -> int:  # fmt: skip
    """How many groups may be issued now (rule 1), and near the job's end no more than are likely to be used.

    Args:
        active: groups issued that have no fate yet, the ready ones included; not those of the step under way.
        ready: those of them that wait for a step.
        groups_per_step: B.
        max_off_policy_steps: k.
        accept_rate: expected share of informative groups, above 0 up to 1.
        still_needed: informative groups that the steps not yet begun need.
        step_under_way: a step has taken its groups, and the version that it makes is not out yet.

    Raises:
        ValueError: `accept_rate` is out of range, or `ready` exceeds `active`.
    """
    if not 0.0 < accept_rate <= 1.0:
        raise ValueError(f"accept_rate must be above 0 and at most 1, not {accept_rate}")
    if not 0 <= ready <= active:
        raise ValueError(f"{ready} groups are ready, but only {active} active")
    taken = active + (groups_per_step if step_under_way else 0)
    free = (max_off_policy_steps + 1) * groups_per_step - taken
    in_flight = active - ready
    useful = math.ceil(max(still_needed - ready, 0) / accept_rate) - in_flight
    return max(0, min(free, useful))


def select_batch(
    ready: Iterable[ReadyGroup],
    in_flight_ages: Iterable[int],
    *,
    groups_per_step: int,
    max_off_policy_steps: int,
    partial: bool = False,
) -> list[ReadyGroup] | None:
    """The groups of the next step, oldest first (equal ages by ordinal), or None while it has to wait (rule 2).

    Args:
        ready: informative groups.
        in_flight_ages: learner's version − version at issue, of each group in flight.
        groups_per_step: B.
        max_off_policy_steps: k.
        partial: a step of fewer than B groups will do, but not of none (the refills of dynamic sampling are used up).

    With nothing in flight a step goes even if groups are left behind that will be too old, which rules 1 and 2 exclude: waiting could
    not help them.
    """
    oldest_first = sorted(ready, key=lambda group: (-group.policy_age, group.group_id))
    chosen, left = oldest_first[:groups_per_step], oldest_first[groups_per_step:]
    if not chosen or (len(chosen) < groups_per_step and not partial):
        return None
    in_flight = list(in_flight_ages)
    ages = sorted([group.policy_age for group in left] + in_flight, reverse=True)
    # ages falls, so its n-th item has age j exactly if n groups or more have age ≥ j: rule 2 for the ages that occur, hence for all
    in_time = all(n <= (max_off_policy_steps - age) * groups_per_step for n, age in enumerate(ages, start=1))
    return chosen if in_time or not in_flight else None


class AcceptRate:
    """Share of judged groups that are informative, newer ones weighing more.

    Counts that decay by 1 − 1/horizon with each group, beside a prior that does not: the estimate follows a change within about `horizon`
    groups and never reaches 0 or 1.
    """

    def __init__(self, prior: float = 0.5, prior_groups: float = 8.0, horizon: float = 256.0) -> None:
        """Starts at `prior`, as sure of it as if `prior_groups` groups had been judged.

        Raises:
            ValueError: a value is out of range.
        """
        if not (0.0 < prior < 1.0 and prior_groups > 0.0 and horizon > 1.0):
            raise ValueError(f"no accept rate from prior {prior}, prior_groups {prior_groups}, horizon {horizon}")
        self._prior, self._prior_groups, self._decay = prior, prior_groups, 1.0 - 1.0 / horizon
        self._judged = 0.0
        self._informative = 0.0

    @property
    def value(self) -> float:
        """The estimate, above 0 and below 1."""
        return (self._informative + self._prior * self._prior_groups) / (self._judged + self._prior_groups)

    def update(self, informative: bool) -> None:
        """Takes in one judged group."""
        self._judged = self._judged * self._decay + 1.0
        self._informative = self._informative * self._decay + informative
