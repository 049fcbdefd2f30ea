"""Groups between issue and fate: the buffer's rules one by one."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from services.common.jobs.fates import Fate
from services.common.spec.job import JobSpec
from services.common.streams.types import RolloutGroup, Verdict, VerdictStatus
from services.learner.groups.buffer import GroupBuffer, Judged
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


def make_buffer(issued: int = 4, spec: JobSpec | None = None) -> GroupBuffer:
    buffer = GroupBuffer(spec or make_spec(), LIMITS, Ledger())
    buffer.ledger.reissue(issued, policy_version=0)
    return buffer


def ids(groups: list[Judged] | None) -> list[int] | None:
    return None if groups is None else [judged.group_id for judged in groups]


def test_an_informative_group_waits_and_a_degenerate_one_ends_at_once() -> None:
    buffer = make_buffer()
    assert buffer.arrived(judged_group(0, INFORMATIVE)) is None
    assert buffer.arrived(judged_group(1, DEGENERATE)) is Fate.DEGENERATE
    assert (buffer.ready, len(buffer.ledger.active)) == (1, 3)


def test_a_group_that_could_not_be_sampled_or_judged_fails_with_its_reason() -> None:
    buffer = make_buffer()
    assert buffer.arrived(judged_group(0, [], failure="the prompt is too long", permanent=True)) is Fate.FAILED
    assert buffer.arrived(judged_group(1, [1.0, None])) is Fate.FAILED
    reasons = {item.group_id: item.reason for item in buffer.ledger.take_unwritten()}
    assert reasons == {0: "the prompt is too long", 1: "only 1 of 2 rollouts could be judged"}
    assert buffer.accept_rate.value == 0.5, "a failure says nothing about the filter"


def test_a_failed_attempt_is_issued_again_and_its_entry_stays_until_the_group_has_a_fate() -> None:
    buffer = make_buffer()
    first = judged_group(0, [], failure="3 of 8 rollouts were sampled within 1 s; the group needs 4")
    assert buffer.arrived(first) is None
    (group,) = buffer.overdue()
    assert (group.group_id, group.attempt, group.failure) == (0, 1, first.scored.group.failure)
    assert buffer.take_settled() == []
    group.attempt, group.failure = 2, ""
    assert buffer.overdue() == []
    again = judged_group(0, DEGENERATE, attempt=2)
    assert buffer.arrived(again) is Fate.DEGENERATE
    assert buffer.take_settled() == [first, again]


def test_after_the_last_attempt_the_group_fails_and_every_entry_of_it_may_go() -> None:
    buffer = make_buffer()
    attempts = [judged_group(0, [], attempt=attempt, failure="no luck") for attempt in (1, 2)]
    for judged in attempts:
        buffer.arrived(judged)
    (group,) = buffer.overdue()
    assert group.attempt == 2, "a restart hears of all attempts at once"
    buffer.give_up(group, "no luck (attempt 2 of 2)")
    assert buffer.take_settled() == attempts
    assert buffer.ledger.take_unwritten() == [Settled(0, Fate.FAILED, "no luck (attempt 2 of 2)")]


def test_the_failure_of_an_attempt_that_was_given_up_before_changes_nothing() -> None:
    buffer = make_buffer()
    buffer.ledger.active[0].attempt = 2
    buffer.arrived(judged_group(0, [], attempt=1, failure="late"))
    assert buffer.overdue() == []


def test_a_group_that_closed_with_fewer_rollouts_is_as_good_as_any() -> None:
    buffer = make_buffer(spec=job_spec(rollout={"group_size": 8, "min_group_size": 2}))
    assert buffer.arrived(judged_group(0, INFORMATIVE)) is None
    assert buffer.ready == 1


def test_checks_that_failed_cost_no_more_rollouts_than_a_deadline_may() -> None:
    def group(group_id: int, *statuses: VerdictStatus) -> Judged:
        judged = judged_group(group_id, [1.0, 0.0, *[None for _ in statuses]])
        verdicts = [*judged.scored.verdicts[:2], *(Verdict(status, None, None, "v", "broke") for status in statuses)]
        return replace(judged, scored=replace(judged.scored, verdicts=tuple(verdicts)))

    failed, timeout = VerdictStatus.FAILED, VerdictStatus.TIMEOUT
    all_needed = make_buffer(spec=job_spec(rollout={"group_size": 4}))
    assert all_needed.arrived(group(0, failed, timeout)) is Fate.FAILED
    assert all_needed.ledger.take_unwritten()[0].reason == "1 of 4 checks failed: broke"
    assert all_needed.arrived(group(1, timeout, timeout)) is None, "the responses' own doing"
    three_needed = make_buffer(spec=job_spec(rollout={"group_size": 4, "min_group_size": 3}))
    assert three_needed.arrived(group(0, failed, timeout)) is None
    assert three_needed.arrived(group(1, failed, failed)) is Fate.FAILED


def test_an_answer_whose_check_was_endless_makes_a_group_of_right_ones_informative() -> None:
    group = judged_group(0, [1.0, 1.0, 1.0, None])
    assert make_buffer().arrived(group) is Fate.DEGENERATE, "as it was journalled before"
    assert make_buffer().arrived(over_limit(group, reward=0.0)) is None
    assert make_buffer().arrived(over_limit(judged_group(0, [None, None]), reward=0.0)) is Fate.DEGENERATE


def test_the_metric_says_what_must_differ_within_a_group() -> None:
    group = judged_group(0, [1.0, 0.5], accuracies=[1.0, 1.0])
    assert make_buffer().arrived(group) is Fate.DEGENERATE
    assert make_buffer(spec=make_spec(filter_groups_metric="reward")).arrived(group) is None
    assert make_buffer(spec=make_spec(filter_groups_enable=False)).arrived(group) is None


def test_a_group_delivered_twice_counts_once_and_its_second_entry_may_go() -> None:
    buffer = make_buffer()
    first, again = judged_group(0, INFORMATIVE), other_entry(judged_group(0, INFORMATIVE))
    buffer.arrived(first)
    assert buffer.arrived(again) is None
    assert (buffer.ready, buffer.judged_since_step) == (1, 1)
    assert buffer.take_settled() == [again]
    buffer.arrived(judged_group(1, DEGENERATE))
    assert buffer.arrived(judged_group(1, INFORMATIVE)) is None
    assert buffer.ledger.counts == Counter({Fate.DEGENERATE: 1})


def test_an_entry_delivered_again_while_its_group_waits_is_not_let_go() -> None:
    buffer = make_buffer()
    buffer.arrived(judged_group(0, INFORMATIVE))
    assert buffer.arrived(judged_group(0, INFORMATIVE)) is None
    assert buffer.take_settled() == [], "the journal does not have the group yet"
    assert buffer.ready == 1


def other_entry(judged: Judged) -> Judged:
    """The same group under another entry, as a second attempt brings it."""
    assert judged.entry is not None
    return replace(judged, entry=replace(judged.entry, id="99-0"))


def test_entries_may_go_only_once_their_groups_have_a_fate() -> None:
    buffer = make_buffer()
    groups = [judged_group(i, INFORMATIVE) for i in range(3)]
    for judged in groups:
        buffer.arrived(judged)
    assert buffer.take_settled() == []
    chosen = buffer.select(0)
    assert chosen is not None
    assert buffer.take_settled() == [], "selecting is not training"
    buffer.begin_training(chosen)
    assert buffer.take_settled() == groups[:2]
    assert buffer.take_settled() == []


def test_selecting_takes_nothing_away() -> None:
    buffer = make_buffer()
    for i in (2, 0):
        buffer.arrived(judged_group(i, INFORMATIVE))
    assert ids(buffer.select(0)) == ids(buffer.select(0)) == [0, 2]


def test_the_oldest_token_decides_who_goes_first_and_who_is_stale() -> None:
    buffer = make_buffer(issued=3, spec=make_spec(bsize=1, k=2))
    for group_id, version in ((0, 3), (1, 1), (2, 2)):
        buffer.arrived(judged_group(group_id, INFORMATIVE, versions=(version, 4)))
    assert ids(buffer.select(4)) == [2]
    assert buffer.ledger.counts[Fate.STALE] == 1
    (stale,) = buffer.ledger.take_unwritten()
    assert stale == Settled(1, Fate.STALE, "policy_age 3 exceeds max_off_policy_steps 2")


def test_a_group_that_arrives_costs_the_same_however_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[RolloutGroup] = []
    oldest = vars(RolloutGroup)["min_policy_version"].fget

    def noted(group: RolloutGroup) -> int:
        reads.append(group)
        return int(oldest(group))

    monkeypatch.setattr(RolloutGroup, "min_policy_version", property(noted))
    buffer = make_buffer(issued=60, spec=make_spec(bsize=60))
    for group_id in range(59):
        buffer.arrived(judged_group(group_id, INFORMATIVE))
        assert buffer.select(0) is None
    assert len(reads) <= 2 * 59
    buffer.arrived(judged_group(59, INFORMATIVE))
    assert ids(buffer.select(0)) == list(range(60))


def test_a_group_that_is_stale_on_arrival_ends_though_no_batch_is_ready() -> None:
    buffer = make_buffer(issued=8, spec=make_spec(bsize=4, k=1))
    for group_id, version in ((0, 4), (1, 2)):
        buffer.arrived(judged_group(group_id, INFORMATIVE, versions=(version, 5)))
        assert buffer.select(4) is None
    assert (buffer.ready, buffer.ledger.counts[Fate.STALE]) == (1, 1)
    assert buffer.select(5) is None
    assert buffer.ready == 1
    assert buffer.select(6) is None
    assert (buffer.ready, buffer.ledger.counts[Fate.STALE]) == (0, 2)


def test_used_up_refills_lead_to_a_smaller_step_instead_of_a_hang() -> None:
    buffer = make_buffer(issued=8, spec=make_spec(bsize=4, k=1, max_batches=1))
    for group_id in range(3):
        buffer.arrived(judged_group(group_id, DEGENERATE))
    buffer.arrived(judged_group(3, INFORMATIVE))
    assert ids(buffer.select(0)) == [3]


def test_used_up_refills_still_wait_for_a_first_informative_group() -> None:
    buffer = make_buffer(issued=8, spec=make_spec(bsize=4, k=1, max_batches=1))
    for group_id in range(6):
        buffer.arrived(judged_group(group_id, DEGENERATE))
    assert buffer.select(0) is None
    buffer.arrived(judged_group(6, INFORMATIVE))
    assert ids(buffer.select(0)) == [6]


def test_failures_in_a_row_end_with_an_informative_or_a_degenerate_group() -> None:
    for good in (INFORMATIVE, DEGENERATE):
        buffer = make_buffer(issued=40)
        for group_id in range(32):
            buffer.arrived(judged_group(group_id, [], failure="too long", permanent=True))
        assert buffer.stall_reason == "32 groups failed in a row; the newest: too long"
        buffer.give_up(buffer.ledger.active[32], "nobody was there", counts=False)
        assert buffer.failures.count == 32
        buffer.arrived(judged_group(33, good))
        assert buffer.failures.count == 0
        assert buffer.stall_reason == ""


def test_groups_whose_every_check_goes_beyond_its_limit_are_failures_in_a_row_though_they_end_as_degenerate() -> None:
    buffer = make_buffer(issued=40)
    for group_id in range(32):
        assert buffer.arrived(over_limit(judged_group(group_id, [None] * 3), reward=0.0)) is Fate.DEGENERATE
    assert buffer.stall_reason.startswith("32 groups failed in a row; the newest: all 3 checks went beyond their limit")
    one_was_judged = over_limit(judged_group(32, [None, None, 0.0]), reward=0.0)
    assert buffer.arrived(one_was_judged) is Fate.DEGENERATE
    assert buffer.stall_reason == ""


def test_a_step_without_any_informative_group_is_said_and_given_up_within_a_bound() -> None:
    buffer = make_buffer(issued=600, spec=make_spec(bsize=4, k=1, max_batches=40))
    for group_id in range(319):
        buffer.arrived(judged_group(group_id, DEGENERATE))
        assert bool(buffer.stall_reason) == (group_id + 1 >= 160)
        assert buffer.no_step_reason == ""
    buffer.arrived(judged_group(319, DEGENERATE))
    assert buffer.no_step_reason == (
        "320 groups were judged for one step and none was informative: each had equal accuracy"
    )
    buffer.arrived(judged_group(320, INFORMATIVE))
    assert (buffer.stall_reason, buffer.no_step_reason) == ("", "")


def test_few_refills_still_leave_a_rare_informative_group_its_time() -> None:
    buffer = make_buffer(issued=300, spec=make_spec(bsize=1, k=1, max_batches=1))
    for group_id in range(255):
        buffer.arrived(judged_group(group_id, DEGENERATE))
    assert buffer.no_step_reason == ""
    buffer.arrived(judged_group(255, DEGENERATE))
    assert buffer.no_step_reason


def test_each_step_has_refills_of_its_own() -> None:
    buffer = make_buffer(issued=8, spec=make_spec(bsize=2, k=3, max_batches=1))
    for group_id, rewards in enumerate([DEGENERATE, INFORMATIVE]):
        buffer.arrived(judged_group(group_id, rewards))
    chosen = buffer.select(0)
    assert ids(chosen) == [1]
    buffer.begin_training(chosen or [])
    buffer.published()
    buffer.arrived(judged_group(2, INFORMATIVE))
    assert buffer.select(1) is None


def test_only_groups_in_flight_can_be_overdue() -> None:
    now = 0.0
    spec = job_spec(rollout={"group_timeout_s": 5.0})
    buffer = GroupBuffer(spec, LIMITS, Ledger(), clock=lambda: now)
    for group_id in range(3):
        buffer.ledger.active[group_id] = ActiveGroup(group_id, 0, issued_at=float(group_id))
    buffer.ledger.issued = 3
    buffer.arrived(judged_group(0, INFORMATIVE))
    now = 6.5
    assert [group.group_id for group in buffer.overdue()] == [1]


def test_a_group_issued_before_a_crash_and_unknown_to_the_ledger_is_taken() -> None:
    buffer = make_buffer(issued=1, spec=make_spec(bsize=2, k=1))
    assert buffer.arrived(judged_group(3, INFORMATIVE)) is None
    assert (buffer.ready, buffer.ledger.issued, sorted(buffer.ledger.active)) == (1, 4, [0, 1, 2, 3])


def test_groups_a_crash_made_unknown_are_not_believed_younger_than_they_are() -> None:
    """Ordinals are issued in order, the first of them while the step before was still under way."""
    buffer = make_buffer(issued=1, spec=make_spec(bsize=2, k=3))
    buffer.arrived(judged_group(2, INFORMATIVE, versions=(5,)))
    assert buffer.ledger.active[1].issue_version == 4


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("share", "bsize", "k"), [(1.0, 4, 0), (1.0, 4, 3), (0.5, 8, 2), (0.2, 8, 3)])
def test_near_the_end_little_is_issued_that_no_step_will_train(share: float, bsize: int, k: int, seed: int) -> None:
    steps, source = 20, random.Random(seed)
    buffer, version, in_flight = GroupBuffer(make_spec(bsize, k, max_batches=1000), LIMITS, Ledger()), 0, []
    while version < steps:
        in_flight += [buffer.ledger.issue(version).group_id for _ in range(buffer.budget(steps - version))]
        if in_flight:
            group_id = in_flight.pop(source.randrange(len(in_flight)))
            rewards = INFORMATIVE if source.random() < share else DEGENERATE
            buffer.arrived(judged_group(group_id, rewards, versions=(version,)))
        chosen = buffer.select(version)
        assert chosen is not None or in_flight
        if chosen is not None:
            buffer.begin_training(chosen)
            version += 1
            buffer.published()
    assert buffer.ledger.counts[Fate.TRAINED] == steps * bsize
    assert len(buffer.ledger.active) <= buffer._spec.slots / 2


def test_with_the_job_every_group_ends_and_none_waits() -> None:
    buffer = make_buffer(issued=4)
    buffer.arrived(judged_group(0, INFORMATIVE))
    buffer.arrived(judged_group(1, DEGENERATE))
    buffer.cancel_all("the job succeeded")
    assert (buffer.ready, len(buffer.ledger.active)) == (0, 0)
    assert buffer.ledger.counts == Counter({Fate.CANCELLED: 3, Fate.DEGENERATE: 1})
    assert buffer.budget(steps_left=0) == 0
