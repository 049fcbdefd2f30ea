"""The gate's rules, and a simulation of the learner's head that tries to break them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.learner.groups.off_policy import HORIZON, AcceptRate, issue_budget, select_batch


def budget(**changes: float | bool) -> int:
    values = {
        "active": 0,
        "ready": 0,
        "groups_per_step": 4,
        "max_off_policy_steps": 2,
        "accept_rate": 1.0,
        "still_needed": 1000,
    }
    return issue_budget(**(values | changes))  # type: ignore[arg-type]


def groups(*ages: int) -> dict[int, int]:
    return dict(enumerate(ages))


def select(
    ready: dict[int, int], in_flight: list[int], *, bsize: int = 2, k: int = 2, partial: bool = False
) -> list[int] | None:
    return select_batch(ready, in_flight, groups_per_step=bsize, max_off_policy_steps=k, partial=partial)


def test_all_slots_are_filled_at_the_start() -> None:
    assert budget() == 12
    assert budget(max_off_policy_steps=0) == 4


def test_a_full_house_issues_nothing() -> None:
    assert budget(active=12, ready=3) == 0
    assert budget(active=14, ready=3) == 0  # after a restart with a smaller bound


def test_a_step_under_way_keeps_its_slots_until_the_version_rises() -> None:
    assert budget(active=8, step_under_way=True) == 0
    assert budget(active=8) == 4
    assert budget(max_off_policy_steps=0, step_under_way=True) == 0


def test_the_end_of_the_job_issues_only_what_the_accept_rate_calls_for() -> None:
    assert budget(still_needed=3, accept_rate=0.5) == 6
    assert budget(still_needed=3, accept_rate=0.5, active=4) == 2
    assert budget(still_needed=3, accept_rate=0.5, active=2, ready=2) == 2
    assert budget(still_needed=3, accept_rate=0.5, active=3, ready=3) == 0
    assert budget(still_needed=0) == 0


@given(st.integers(1, 8), st.integers(0, 4), st.integers(0, 40), st.integers(1, 100), st.floats(1e-6, 1.0))
def test_with_nothing_in_flight_a_group_that_is_needed_is_issued(
    bsize: int, k: int, ready: int, needed: int, rate: float
) -> None:
    got = issue_budget(
        active=ready, ready=ready, groups_per_step=bsize, max_off_policy_steps=k, accept_rate=rate, still_needed=needed
    )
    assert (got >= 1) is (ready < needed and ready < (k + 1) * bsize)


@pytest.mark.parametrize("changes", [{"accept_rate": 0.0}, {"accept_rate": 1.5}, {"ready": 2, "active": 1}])
def test_impossible_counts_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"accept_rate|ready"):
        budget(**changes)


def test_the_oldest_go_first_and_equal_ages_by_ordinal() -> None:
    assert select(groups(0, 1, 0, 2, 1), [0], bsize=3) == [3, 1, 4]


def test_a_step_waits_for_its_full_number_of_groups() -> None:
    assert select(groups(1), []) is None
    assert select({}, [], partial=True) is None
    assert select(groups(1), [], partial=True) == [0]


def test_a_surplus_group_waits_for_the_next_step() -> None:
    assert select(groups(0, 0, 0), []) == [0, 1]


def test_a_step_waits_for_a_group_in_flight_that_could_not_go_later() -> None:
    assert select(groups(2, 2), [2]) is None
    assert select(groups(2, 2), [1]) == [0, 1]
    assert select(groups(2), [2], partial=True) is None


def test_a_step_waits_while_more_would_stay_behind_than_the_next_can_take() -> None:
    assert select(groups(1, 1), [1, 1]) == [0, 1]
    assert select(groups(1, 1), [1, 1, 1]) is None


def test_the_synchronous_mode_leaves_nothing_behind() -> None:
    assert select(groups(0, 0), [0], k=0) is None
    assert select(groups(0, 0), [], k=0) == [0, 1]


def test_waiting_ends_when_nothing_is_in_flight_whatever_the_ages() -> None:
    assert select(groups(5, 5, 5), [], k=2) == [0, 1]


@given(
    st.lists(st.integers(0, 3), max_size=14), st.lists(st.integers(0, 3), min_size=1, max_size=14), st.integers(1, 4), st.integers(0, 3)
)  # fmt: skip
def test_a_step_goes_exactly_if_each_age_left_behind_fits_its_remaining_steps(
    ready_ages: list[int], in_flight: list[int], bsize: int, k: int
) -> None:
    ready = groups(*ready_ages)
    chosen = select(ready, in_flight, bsize=bsize, k=k)
    if len(ready) < bsize:
        assert chosen is None
        return
    taken = sorted(ready, key=lambda group_id: (-ready[group_id], group_id))[:bsize]
    left = [age for group_id, age in ready.items() if group_id not in taken] + in_flight
    # any age beyond k counts as k
    fits = all(sum(age >= j for age in left) <= (k - j) * bsize for j in range(k + 1))
    assert chosen == (taken if fits else None)


def test_the_accept_rate_begins_at_its_prior_and_finds_the_share() -> None:
    rate = AcceptRate()
    assert rate.value == 0.5
    for _ in range(300):
        for informative in (True, False, False, False):
            rate.update(informative)
    assert rate.value == pytest.approx(0.25, abs=0.02)


def test_the_accept_rate_follows_a_change_within_its_horizon() -> None:
    rate = AcceptRate()
    for _ in range(8000):
        rate.update(True)
    for _ in range(int(2 * HORIZON)):
        rate.update(False)
    assert rate.value < 0.3


@pytest.mark.parametrize("informative", [True, False])
def test_the_accept_rate_never_reaches_its_ends(informative: bool) -> None:
    rate = AcceptRate()
    for _ in range(20_000):
        rate.update(informative)
        assert 0.005 < rate.value < 0.995


@dataclass(slots=True)
class Simulated:
    """A group as the simulation knows it."""

    issue_version: int
    """What the gate is told."""
    oldest_token: int | None = None
    """Version that sampled its oldest token; None until a server has begun."""


class HeadSimulation(RuleBasedStateMachine):
    """Issues, completes in any order, filters, fails, crashes, and steps (full ones, and short ones when refills are used up)."""

    @initialize(bsize=st.integers(1, 5), k=st.integers(0, 3), steps=st.integers(1, 40))
    def begin(self, bsize: int, k: int, steps: int) -> None:
        self.bsize, self.k, self.steps = bsize, k, steps
        self.version, self.issued, self.training = 0, 0, 0
        self.in_flight: dict[int, Simulated] = {}
        self.ready: dict[int, int] = {}
        self.rate = AcceptRate()

    @property
    def budget(self) -> int:
        begun = self.version + (1 if self.training else 0)
        return issue_budget(
            active=len(self.in_flight) + len(self.ready), ready=len(self.ready), groups_per_step=self.bsize,
            max_off_policy_steps=self.k, accept_rate=self.rate.value, still_needed=(self.steps - begun) * self.bsize,
            step_under_way=bool(self.training),
        )  # fmt: skip

    def select(self, *, partial: bool = False) -> list[int] | None:
        return select_batch(
            {group_id: self.version - oldest for group_id, oldest in self.ready.items()},
            [self.version - group.issue_version for group in self.in_flight.values()],
            groups_per_step=self.bsize, max_off_policy_steps=self.k, partial=partial,
        )  # fmt: skip

    @rule(share=st.floats(0.0, 1.0))
    def issue(self, share: float) -> None:
        for _ in range(math.ceil(self.budget * share)):
            self.in_flight[self.issued] = Simulated(self.version)
            self.issued += 1

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def a_server_begins_a_group(self, data: st.DataObject) -> None:
        group = self.in_flight[data.draw(st.sampled_from(sorted(self.in_flight)))]
        if group.oldest_token is None:
            group.oldest_token = data.draw(st.integers(group.issue_version, self.version))

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), outcome=st.sampled_from(["informative", "informative", "degenerate", "failed"]))
    def a_group_comes_back(self, data: st.DataObject, outcome: str) -> None:
        group = self.in_flight.pop(group_id := data.draw(st.sampled_from(sorted(self.in_flight))))
        if outcome != "failed":
            self.rate.update(outcome == "informative")
        if outcome == "informative":
            oldest = group.oldest_token
            self.ready[group_id] = (
                oldest if oldest is not None else data.draw(st.integers(group.issue_version, self.version))
            )

    @precondition(lambda self: not self.training and self.version < self.steps)
    @rule(refills_are_used_up=st.booleans())
    def a_step_begins(self, refills_are_used_up: bool) -> None:
        chosen = self.select(partial=refills_are_used_up)
        if chosen is None:
            return
        assert 1 <= len(chosen) <= self.bsize
        assert refills_are_used_up or len(chosen) == self.bsize
        for group_id in chosen:
            assert 0 <= self.version - self.ready.pop(group_id) <= self.k
        if not self.in_flight:  # the gate goes on in any case then, and what it leaves behind must fit all the same
            left = [self.version - oldest for oldest in self.ready.values()]
            assert all(sum(age >= j for age in left) <= (self.k - j) * self.bsize for j in range(self.k + 1))
        self.training = len(chosen)

    @precondition(lambda self: self.training)
    @rule()
    def a_step_ends(self) -> None:
        self.version += 1
        self.training = 0

    @precondition(lambda self: not self.training)
    @rule()
    def the_learner_crashes(self) -> None:
        """What was ready is delivered again; the ledger only knows that nothing is older than k; the rest is asked for anew."""
        oldest = max(0, self.version - self.k)
        for group_id, token in self.ready.items():
            self.in_flight[group_id] = Simulated(oldest, token)
        self.ready.clear()
        for group in self.in_flight.values():
            group.issue_version = oldest
            group.oldest_token = self.version if group.oldest_token is None else group.oldest_token

    @invariant()
    def the_slots_are_never_exceeded(self) -> None:
        taken = len(self.in_flight) + len(self.ready) + (self.bsize if self.training else 0)
        assert taken <= (self.k + 1) * self.bsize

    @invariant()
    def no_group_is_ever_too_old_to_be_trained(self) -> None:
        for oldest in self.ready.values():
            assert self.version - oldest <= self.k
        for group in self.in_flight.values():
            assert self.version - group.issue_version <= self.k

    @invariant()
    def with_nothing_in_flight_a_step_can_go_or_a_group_be_issued(self) -> None:
        if not self.in_flight and not self.training and self.version < self.steps:
            assert self.select() is not None or self.budget > 0


TestHeadSimulation = HeadSimulation.TestCase
TestHeadSimulation.settings = settings(max_examples=200, stateful_step_count=100)
