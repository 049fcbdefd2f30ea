"""Off-policy bound: the number of groups that may be issued, and the moment at which a step may begin. Pure.

B = groups_per_step, k = max_off_policy_steps. A group is active from its issue until it has a fate: in flight, then ready (informative and
waiting). It is trained at `policy_age` = learner's version − its oldest token's version, which is at most its age since issue.

Two rules:

1. Slots: active groups, plus B for a step under way, never exceed (k + 1) · B. The step keeps its B slots until the version has risen,
   even if it trains fewer groups: a group that is issued meanwhile is sampled by the old version and ages at once.
2. Deadlines: a step may begin if, for every age j from 0 to k, at most (k − j) · B active groups of age j or more remain, because a group
   of age j has k − j steps left.

No group ever exceeds age k, and none waits forever:

- With j = k: no group of age k remains after a step's choice, so when the version rises by one, no group reaches k + 1.
- The version's rise turns rule 2 into: at most (k − j + 1) · B groups of age ≥ j, for j ≥ 1; rule 1 says the same for j = 0.
- So once nothing is in flight, a step of the B oldest may begin; and with fewer than B ready, rule 1 leaves slots free for issue.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

PRIOR = 0.5
"""Accept rate before any group is judged."""
PRIOR_GROUPS = 8.0
"""Weight of the prior, in judged groups."""
HORIZON = 256.0
"""Judged groups within which the accept rate follows a change."""


def issue_budget(
    *, active: int, ready: int, groups_per_step: int, max_off_policy_steps: int, accept_rate: float, still_needed: int,
    step_under_way: bool = False,
) -> int:  # fmt: skip
    """Number of groups that may be issued now (rule 1), and near the job's end no more than are likely to be used.

    `active` groups are issued and have no fate, `ready` of them wait for a step; groups of the step under way, whose version is not
    published yet, are in neither. The steps not yet begun need `still_needed` informative groups; `accept_rate` (above 0, up to 1) is the
    expected share of informative groups.

    Raises:
        ValueError: `accept_rate` is out of range, or `ready` exceeds `active`.
    """
    if not 0.0 < accept_rate <= 1.0:
        raise ValueError(f"accept_rate must be above 0 and at most 1, not {accept_rate}")
    if not 0 <= ready <= active:
        raise ValueError(f"{ready} groups are ready, but only {active} active")
    taken = active + (groups_per_step if step_under_way else 0)
    free = (max_off_policy_steps + 1) * groups_per_step - taken
    useful = math.ceil(max(still_needed - ready, 0) / accept_rate) - (active - ready)
    return max(0, min(free, useful))


def select_batch(
    ready: Mapping[int, int], in_flight: list[int], *, groups_per_step: int, max_off_policy_steps: int, partial: bool
) -> list[int] | None:
    """The groups of the next step, oldest first (equal ages by ordinal), or None while it has to wait (rule 2).

    `ready`: ordinal → policy_age of each ready group; `in_flight`: age since issue of each group in flight;
    `partial`: the refills of dynamic sampling are used up, so a step of fewer than B groups may begin, but not of none.

    With nothing in flight a step begins even if groups remain that will be too old, which rules 1 and 2 exclude: waiting would not help
    them.
    """
    oldest_first = sorted(ready, key=lambda group_id: (-ready[group_id], group_id))
    chosen, left = oldest_first[:groups_per_step], oldest_first[groups_per_step:]
    if not chosen or (len(chosen) < groups_per_step and not partial):
        return None
    ages = sorted([ready[group_id] for group_id in left] + in_flight, reverse=True)
    # ages is descending: its n-th item has age ≥ j exactly if n or more groups have age ≥ j. Rule 2 for the ages that occur, so for all.
    in_time = all(n <= (max_off_policy_steps - age) * groups_per_step for n, age in enumerate(ages, start=1))
    return chosen if in_time or not in_flight else None


class AcceptRate:
    """Share of judged groups that are informative; newer groups weigh more.

    Counts decay by 1 − 1/HORIZON with each group, and the prior does not: the estimate never reaches 0 or 1.
    """

    def __init__(self) -> None:
        self._judged = self._informative = 0.0

    @property
    def value(self) -> float:
        """The estimate, above 0 and below 1."""
        return (self._informative + PRIOR * PRIOR_GROUPS) / (self._judged + PRIOR_GROUPS)

    def update(self, informative: bool) -> None:
        """Adds one judged group."""
        decay = 1.0 - 1.0 / HORIZON
        self._judged = self._judged * decay + 1.0
        self._informative = self._informative * decay + informative
