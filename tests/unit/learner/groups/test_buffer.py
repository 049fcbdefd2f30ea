"""Groups between issue and fate: the intake's rules one by one."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from services.common.jobs.fates import Fate
from services.common.spec.job import JobSpec
from services.common.streams.types import Verdict, VerdictStatus
from services.learner.groups.buffer import Intake, Judged
from services.learner.groups.ledger import ActiveGroup, Ledger, Settled
from tests.unit.learner.scored_groups import (
    DEGENERATE,
    INFORMATIVE,
    LIMITS,
    job_spec,
    judged_group,
    make_spec,
    over_limit,
)


def make_intake(issued: int = 4, spec: JobSpec | None = None) -> Intake:
    intake = Intake(spec or make_spec(), LIMITS, Ledger())
    intake.ledger.reissue(issued, policy_version=0)
    return intake


def ids(groups: list[Judged] | None) -> list[int] | None:
    return None if groups is None else [judged.group_id for judged in groups]


def test_an_informative_group_waits_and_a_degenerate_one_ends_at_once() -> None:
    intake = make_intake()
    assert intake.arrived(judged_group(0, INFORMATIVE)) is None
    assert intake.arrived(judged_group(1, DEGENERATE)) is Fate.DEGENERATE
    assert (intake.ready, len(intake.ledger.active)) == (1, 3)


def test_a_group_that_could_not_be_sampled_or_judged_fails_with_its_reason() -> None:
    intake = make_intake()
    assert intake.arrived(judged_group(0, [], failure="the prompt is too long", permanent=True)) is Fate.FAILED
    assert intake.arrived(judged_group(1, [1.0, None])) is Fate.FAILED
    reasons = {item.group_id: item.reason for item in intake.ledger.take_unwritten()}
    assert reasons == {0: "the prompt is too long", 1: "only 1 of 2 rollouts could be judged"}
    assert intake.accept_rate.value == 0.5, "a failure says nothing about the filter"


def test_a_failed_attempt_is_issued_again_and_its_entry_stays_until_the_group_has_a_fate() -> None:
    intake = make_intake()
    first = judged_group(0, [], failure="3 of 8 rollouts were sampled within 1 s; the group needs 4")
    assert intake.arrived(first) is None
    (group,) = intake.overdue()
    assert (group.group_id, group.attempt, group.failure) == (0, 1, first.scored.group.failure)
    assert intake.take_settled() == []
    group.attempt, group.failure = 2, ""
    assert intake.overdue() == []
    again = judged_group(0, DEGENERATE, attempt=2)
    assert intake.arrived(again) is Fate.DEGENERATE
    assert intake.take_settled() == [first, again]


def test_after_the_last_attempt_the_group_fails_and_every_entry_of_it_may_go() -> None:
    intake = make_intake()
    attempts = [judged_group(0, [], attempt=attempt, failure="no luck") for attempt in (1, 2)]
    for judged in attempts:
        intake.arrived(judged)
    (group,) = intake.overdue()
    assert group.attempt == 2, "a restart hears of all attempts at once"
    intake.give_up(group, "no luck (attempt 2 of 2)")
    assert intake.take_settled() == attempts
    assert intake.ledger.take_unwritten() == [Settled(0, Fate.FAILED, "no luck (attempt 2 of 2)")]


def test_the_failure_of_an_attempt_that_was_given_up_before_changes_nothing() -> None:
    intake = make_intake()
    intake.ledger.active[0].attempt = 2
    intake.arrived(judged_group(0, [], attempt=1, failure="late"))
    assert intake.overdue() == []


def test_a_group_that_closed_with_fewer_rollouts_is_as_good_as_any() -> None:
    intake = make_intake(spec=job_spec(rollout={"group_size": 8, "min_group_size": 2}))
    assert intake.arrived(judged_group(0, INFORMATIVE)) is None
    assert intake.ready == 1


def test_checks_that_failed_cost_no_more_rollouts_than_a_deadline_may() -> None:
    def group(group_id: int, *statuses: VerdictStatus) -> Judged:
        judged = judged_group(group_id, [1.0, 0.0, *[None for _ in statuses]])
        verdicts = [*judged.scored.verdicts[:2], *(Verdict(status, None, None, "v", "broke") for status in statuses)]
        return replace(judged, scored=replace(judged.scored, verdicts=tuple(verdicts)))

    failed, timeout = VerdictStatus.FAILED, VerdictStatus.TIMEOUT
    all_needed = make_intake(spec=job_spec(rollout={"group_size": 4}))
    assert all_needed.arrived(group(0, failed, timeout)) is Fate.FAILED
    assert all_needed.ledger.take_unwritten()[0].reason == "1 of 4 checks failed: broke"
    assert all_needed.arrived(group(1, timeout, timeout)) is None, "the responses' own doing"
    three_needed = make_intake(spec=job_spec(rollout={"group_size": 4, "min_group_size": 3}))
    assert three_needed.arrived(group(0, failed, timeout)) is None
    assert three_needed.arrived(group(1, failed, failed)) is Fate.FAILED


def test_an_answer_whose_check_was_endless_makes_a_group_of_right_ones_informative() -> None:
    group = judged_group(0, [1.0, 1.0, 1.0, None])
    assert make_intake().arrived(group) is Fate.DEGENERATE, "as it was journalled before"
    assert make_intake().arrived(over_limit(group, reward=0.0)) is None
    assert make_intake().arrived(over_limit(judged_group(0, [None, None]), reward=0.0)) is Fate.DEGENERATE


def test_the_metric_says_what_must_differ_within_a_group() -> None:
    group = judged_group(0, [1.0, 0.5], accuracies=[1.0, 1.0])
    assert make_intake().arrived(group) is Fate.DEGENERATE
    assert make_intake(spec=make_spec(filter_groups_metric="reward")).arrived(group) is None
    assert make_intake(spec=make_spec(filter_groups_enable=False)).arrived(group) is None


def test_a_group_delivered_twice_counts_once_and_its_second_entry_may_go() -> None:
    intake = make_intake()
    first, again = judged_group(0, INFORMATIVE), other_entry(judged_group(0, INFORMATIVE))
    intake.arrived(first)
    assert intake.arrived(again) is None
    assert (intake.ready, intake.judged_since_step) == (1, 1)
    assert intake.take_settled() == [again]
    intake.arrived(judged_group(1, DEGENERATE))
    assert intake.arrived(judged_group(1, INFORMATIVE)) is None
    assert intake.ledger.counts == Counter({Fate.DEGENERATE: 1})


def test_an_entry_delivered_again_while_its_group_waits_is_not_let_go() -> None:
    intake = make_intake()
    intake.arrived(judged_group(0, INFORMATIVE))
    assert intake.arrived(judged_group(0, INFORMATIVE)) is None
    assert intake.take_settled() == [], "the journal does not have the group yet"
    assert intake.ready == 1


def other_entry(judged: Judged) -> Judged:
    """The same group under another entry, as a second attempt brings it."""
    assert judged.entry is not None
    return replace(judged, entry=replace(judged.entry, id="99-0"))


def test_entries_may_go_only_once_their_groups_have_a_fate() -> None:
    intake = make_intake()
    groups = [judged_group(i, INFORMATIVE) for i in range(3)]
    for judged in groups:
        intake.arrived(judged)
    assert intake.take_settled() == []
    chosen = intake.select(0)
    assert chosen is not None
    assert intake.take_settled() == [], "selecting is not training"
    intake.begin_training(chosen)
    assert intake.take_settled() == groups[:2]
    assert intake.take_settled() == []


def test_selecting_takes_nothing_away() -> None:
    intake = make_intake()
    for i in (2, 0):
        intake.arrived(judged_group(i, INFORMATIVE))
    assert ids(intake.select(0)) == ids(intake.select(0)) == [0, 2]


def test_the_oldest_token_decides_who_goes_first_and_who_is_stale() -> None:
    intake = make_intake(issued=3, spec=make_spec(bsize=1, k=2))
    for group_id, version in ((0, 3), (1, 1), (2, 2)):
        intake.arrived(judged_group(group_id, INFORMATIVE, versions=(version, 4)))
    assert ids(intake.select(4)) == [2]
    assert intake.ledger.counts[Fate.STALE] == 1
    (stale,) = intake.ledger.take_unwritten()
    assert stale == Settled(1, Fate.STALE, "policy_age 3 exceeds max_off_policy_steps 2")


def test_used_up_refills_lead_to_a_smaller_step_instead_of_a_hang() -> None:
    intake = make_intake(issued=8, spec=make_spec(bsize=4, k=1, max_batches=1))
    for group_id in range(3):
        intake.arrived(judged_group(group_id, DEGENERATE))
    intake.arrived(judged_group(3, INFORMATIVE))
    assert ids(intake.select(0)) == [3]


def test_used_up_refills_still_wait_for_a_first_informative_group() -> None:
    intake = make_intake(issued=8, spec=make_spec(bsize=4, k=1, max_batches=1))
    for group_id in range(6):
        intake.arrived(judged_group(group_id, DEGENERATE))
    assert intake.select(0) is None
    intake.arrived(judged_group(6, INFORMATIVE))
    assert ids(intake.select(0)) == [6]


def test_failures_in_a_row_end_with_an_informative_or_a_degenerate_group() -> None:
    for good in (INFORMATIVE, DEGENERATE):
        intake = make_intake(issued=40)
        for group_id in range(32):
            intake.arrived(judged_group(group_id, [], failure="too long", permanent=True))
        assert intake.fruitless == "32 groups failed in a row; the newest: too long"
        intake.give_up(intake.ledger.active[32], "nobody was there", counts=False)
        assert intake.failures.count == 32
        intake.arrived(judged_group(33, good))
        assert intake.failures.count == 0
        assert intake.fruitless == ""


def test_groups_whose_every_check_goes_beyond_its_limit_are_failures_in_a_row_though_they_end_as_degenerate() -> None:
    intake = make_intake(issued=40)
    for group_id in range(32):
        assert intake.arrived(over_limit(judged_group(group_id, [None] * 3), reward=0.0)) is Fate.DEGENERATE
    assert intake.fruitless.startswith("32 groups failed in a row; the newest: all 3 checks went beyond their limit")
    one_was_judged = over_limit(judged_group(32, [None, None, 0.0]), reward=0.0)
    assert intake.arrived(one_was_judged) is Fate.DEGENERATE
    assert intake.fruitless == ""


def test_a_step_without_any_informative_group_is_said_and_given_up_within_a_bound() -> None:
    intake = make_intake(issued=600, spec=make_spec(bsize=4, k=1, max_batches=40))
    for group_id in range(319):
        intake.arrived(judged_group(group_id, DEGENERATE))
        assert bool(intake.fruitless) == (group_id + 1 >= 160)
        assert intake.hopeless == ""
    intake.arrived(judged_group(319, DEGENERATE))
    assert intake.hopeless == ("320 groups were judged for one step and none was informative: each had equal accuracy")
    intake.arrived(judged_group(320, INFORMATIVE))
    assert (intake.fruitless, intake.hopeless) == ("", "")


def test_few_refills_still_leave_a_rare_informative_group_its_time() -> None:
    intake = make_intake(issued=300, spec=make_spec(bsize=1, k=1, max_batches=1))
    for group_id in range(255):
        intake.arrived(judged_group(group_id, DEGENERATE))
    assert intake.hopeless == ""
    intake.arrived(judged_group(255, DEGENERATE))
    assert intake.hopeless


def test_each_step_has_refills_of_its_own() -> None:
    intake = make_intake(issued=8, spec=make_spec(bsize=2, k=3, max_batches=1))
    for group_id, rewards in enumerate([DEGENERATE, INFORMATIVE]):
        intake.arrived(judged_group(group_id, rewards))
    chosen = intake.select(0)
    assert ids(chosen) == [1]
    intake.begin_training(chosen or [])
    intake.published()
    intake.arrived(judged_group(2, INFORMATIVE))
    assert intake.select(1) is None


def test_only_groups_in_flight_can_be_overdue() -> None:
    now = 0.0
    spec = job_spec(rollout={"group_timeout_s": 5.0})
    intake = Intake(spec, LIMITS, Ledger(), clock=lambda: now)
    for group_id in range(3):
        intake.ledger.active[group_id] = ActiveGroup(group_id, 0, issued_at=float(group_id))
    intake.ledger.issued = 3
    intake.arrived(judged_group(0, INFORMATIVE))
    now = 6.5
    assert [group.group_id for group in intake.overdue()] == [1]


def test_a_group_issued_before_a_crash_and_unknown_to_the_ledger_is_taken() -> None:
    intake = make_intake(issued=1, spec=make_spec(bsize=2, k=1))
    assert intake.arrived(judged_group(3, INFORMATIVE)) is None
    assert (intake.ready, intake.ledger.issued, sorted(intake.ledger.active)) == (1, 4, [0, 1, 2, 3])


def test_groups_a_crash_made_unknown_are_not_believed_younger_than_they_are() -> None:
    """Ordinals are issued in order, the first of them while the step before was still under way."""
    intake = make_intake(issued=1, spec=make_spec(bsize=2, k=3))
    intake.arrived(judged_group(2, INFORMATIVE, versions=(5,)))
    assert intake.ledger.active[1].issue_version == 4


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("share", "bsize", "k"), [(1.0, 4, 0), (1.0, 4, 3), (0.5, 8, 2), (0.2, 8, 3)])
def test_near_the_end_little_is_issued_that_no_step_will_train(share: float, bsize: int, k: int, seed: int) -> None:
    steps, source = 20, random.Random(seed)
    intake, version, in_flight = Intake(make_spec(bsize, k, max_batches=1000), LIMITS, Ledger()), 0, []
    while version < steps:
        in_flight += [intake.ledger.issue(version).group_id for _ in range(intake.budget(steps - version))]
        if in_flight:
            group_id = in_flight.pop(source.randrange(len(in_flight)))
            rewards = INFORMATIVE if source.random() < share else DEGENERATE
            intake.arrived(judged_group(group_id, rewards, versions=(version,)))
        chosen = intake.select(version)
        assert chosen is not None or in_flight
        if chosen is not None:
            intake.begin_training(chosen)
            version += 1
            intake.published()
    assert intake.ledger.counts[Fate.TRAINED] == steps * bsize
    assert len(intake.ledger.active) <= intake._spec.slots / 2


def test_with_the_job_every_group_ends_and_none_waits() -> None:
    intake = make_intake(issued=4)
    intake.arrived(judged_group(0, INFORMATIVE))
    intake.arrived(judged_group(1, DEGENERATE))
    intake.cancel_all("the job succeeded")
    assert (intake.ready, len(intake.ledger.active)) == (0, 0)
    assert intake.ledger.counts == Counter({Fate.CANCELLED: 3, Fate.DEGENERATE: 1})
    assert intake.budget(steps_left=0) == 0
