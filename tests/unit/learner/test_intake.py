"""Groups between issue and fate: the intake's rules, and a simulation of a whole job, crashes included, that tries to break them."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.common.spec import JobSpec
from services.learner.intake import Intake, Judged
from services.learner.ledger import ActiveGroup, Fate, Ledger, Settled
from tests.unit.learner.scored_groups import job_spec, judged_group

INFORMATIVE, DEGENERATE = [1.0, 0.0], [1.0, 1.0]


def make_spec(bsize: int = 2, k: int = 1, max_batches: int = 20, **algorithm: object) -> JobSpec:
    sizes = {"filter_groups_train_batch_size": bsize, "filter_groups_max_batches": max_batches}
    return job_spec(algorithm=sizes | algorithm, off_policy={"max_off_policy_steps": k})


def make_intake(issued: int = 4, spec: JobSpec | None = None) -> Intake:
    intake = Intake(spec or make_spec(), Ledger())
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
    assert intake.arrived(judged_group(0, [], failure="the prompt is too long")) is Fate.FAILED
    assert intake.arrived(judged_group(1, [1.0, None])) is Fate.FAILED
    reasons = {item.group_id: item.reason for item in intake.ledger.take_unwritten()}
    assert reasons == {0: "the prompt is too long", 1: "only 1 of 2 rollouts could be judged"}
    assert intake.accept_rate.value == 0.5, "a failure says nothing about the filter"


def test_the_metric_says_what_must_differ_within_a_group() -> None:
    group = judged_group(0, [1.0, 0.5], accuracies=[1.0, 1.0])
    assert make_intake().arrived(group) is Fate.DEGENERATE
    assert make_intake(spec=make_spec(filter_groups_metric="reward")).arrived(group) is None
    assert make_intake(spec=make_spec(filter_groups_enable=False)).arrived(group) is None


def test_a_group_delivered_twice_counts_once_and_its_second_entry_may_go() -> None:
    intake = make_intake()
    first, again = judged_group(0, INFORMATIVE), judged_group(0, INFORMATIVE)
    intake.arrived(first)
    assert intake.arrived(again) is None
    assert (intake.ready, intake.judged_since_step) == (1, 1)
    assert intake.take_settled() == [again]
    intake.arrived(judged_group(1, DEGENERATE))
    assert intake.arrived(judged_group(1, INFORMATIVE)) is None
    assert intake.ledger.counts == Counter({Fate.DEGENERATE: 1})


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
    intake = Intake(spec, Ledger(), clock=lambda: now)
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
    intake, version, in_flight = Intake(make_spec(bsize, k, max_batches=1000), Ledger()), 0, []
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


class JobSimulation(RuleBasedStateMachine):
    """Servers, the reward service, the stream, and the head's loops, as one person pulling levers in any order."""

    @initialize(
        bsize=st.integers(1, 6),
        k=st.integers(0, 4),
        steps=st.integers(1, 12),
        max_batches=st.sampled_from([1, 2, 1000]),
    )
    def begin(self, bsize: int, k: int, steps: int, max_batches: int) -> None:
        self.bsize, self.k, self.steps, self.max_batches = bsize, k, steps, max_batches
        self.spec = make_spec(bsize, k, max_batches)
        self.intake = Intake(self.spec, Ledger())
        self.version = 0
        self.crashes = 0
        self.known: set[int] = set()
        """Ordinals that the streams have seen: adding one again changes nothing."""
        self.in_flight: dict[int, tuple[int, int | None]] = {}
        """Issue version, and the version of the oldest token once a server has begun."""
        self.unacked: dict[int, Judged] = {}
        """Entries of the scored stream, in their order."""
        self.undelivered: list[Judged] = []
        """Those of them that the head has to be given again after a crash."""
        self.journal: list[tuple[int, list[Settled]]] = []

    @property
    def ledger(self) -> Ledger:
        return self.intake.ledger

    def issue_up_to(self, share: float = 1.0) -> None:
        for _ in range(math.ceil(self.intake.budget(self.steps - self.version) * share)):
            group = self.ledger.issue(self.version)
            if group.group_id not in self.known:
                self.known.add(group.group_id)
                self.in_flight[group.group_id] = (self.version, None)

    def come_back(self, group_id: int, rewards: list[float | None], oldest: int, failure: str | None = None) -> None:
        del self.in_flight[group_id]
        judged = judged_group(group_id, [] if failure else rewards, versions=(oldest,), failure=failure)
        self.unacked[group_id] = judged
        if self.undelivered:
            self.undelivered.append(judged)
        else:
            self.intake.arrived(judged)

    def redeliver(self) -> None:
        self.intake.arrived(self.undelivered.pop(0))

    def step_begins(self) -> bool:
        chosen = self.intake.select(self.version)
        if chosen is None:
            return False
        ages = [self.version - judged.scored.group.min_policy_version for judged in chosen]
        assert all(0 <= age <= self.k for age in ages)
        assert 1 <= len(chosen) <= self.bsize
        assert len(chosen) == self.bsize or self.intake.judged_since_step >= self.max_batches * self.bsize
        self.intake.begin_training(chosen)
        self.journal.append((self.ledger.issued, self.ledger.take_unwritten()))
        for judged in self.intake.take_settled():
            self.unacked.pop(judged.group_id, None)
        return True

    def step_ends(self) -> None:
        self.version += 1
        self.intake.published()

    @rule(share=st.floats(0.0, 1.0))
    def tasks_are_issued(self, share: float) -> None:
        self.issue_up_to(share)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def a_server_begins_a_group(self, data: st.DataObject) -> None:
        group_id = data.draw(st.sampled_from(sorted(self.in_flight)))
        issued, begun = self.in_flight[group_id]
        if begun is None:
            self.in_flight[group_id] = issued, data.draw(st.integers(issued, max(issued, self.version)))

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), outcome=st.sampled_from(["informative", "informative", "degenerate", "failed", "unjudged"]))
    def a_group_comes_back(self, data: st.DataObject, outcome: str) -> None:
        group_id = data.draw(st.sampled_from(sorted(self.in_flight)))
        issued, begun = self.in_flight[group_id]
        oldest = begun if begun is not None else data.draw(st.integers(issued, max(issued, self.version)))
        rewards = {"informative": INFORMATIVE, "degenerate": DEGENERATE}.get(outcome, [1.0, None])
        self.come_back(group_id, list(rewards), oldest, "no such task" if outcome == "failed" else None)

    @precondition(lambda self: self.unacked)
    @rule(data=st.data())
    def a_group_comes_back_once_more(self, data: st.DataObject) -> None:
        group_id = data.draw(st.sampled_from(sorted(self.unacked)))
        if self.unacked[group_id] in self.undelivered:
            return
        before = self.ledger.summary(), self.intake.ready, self.intake.accept_rate.value
        assert self.intake.arrived(judged_group(group_id, DEGENERATE)) is None
        assert (self.ledger.summary(), self.intake.ready, self.intake.accept_rate.value) == before

    @precondition(lambda self: not self.intake.step_under_way and self.version < self.steps)
    @rule()
    def a_step_begins(self) -> None:
        self.step_begins()

    @precondition(lambda self: self.intake.step_under_way)
    @rule()
    def a_step_ends(self) -> None:
        self.step_ends()

    @precondition(lambda self: self.undelivered)
    @rule()
    def an_entry_is_delivered_again(self) -> None:
        self.redeliver()

    @invariant()
    def the_slots_are_never_exceeded(self) -> None:
        taken = len(self.ledger.active) + (self.bsize if self.intake.step_under_way else 0)
        assert self.crashes or taken <= self.spec.slots

    @invariant()
    def no_informative_group_is_ever_stale(self) -> None:
        assert self.crashes or not self.ledger.counts[Fate.STALE]
        for group in () if self.crashes else self.ledger.active.values():
            assert self.version - group.issue_version <= self.k

    @invariant()
    def every_issued_group_is_active_or_has_one_fate(self) -> None:
        assert sum(self.ledger.counts.values()) + len(self.ledger.active) == self.ledger.issued
        assert self.intake.ready == sum(group.ready for group in self.ledger.active.values())

    def teardown(self) -> None:
        """From wherever the levers were left, the job runs to its end, and every group has one fate in the journal."""
        if not hasattr(self, "intake"):
            return
        turns = 0
        while self.version < self.steps:
            turns += 1
            assert turns < 10_000, "the job hangs"
            if self.intake.step_under_way:
                self.step_ends()
            elif not self.step_begins():
                self.issue_up_to()
                assert self.in_flight or self.undelivered, "nothing is in flight, no step can go and no task be issued"
                while self.undelivered:
                    self.redeliver()
                for group_id in sorted(self.in_flight):
                    issued, begun = self.in_flight[group_id]
                    self.come_back(group_id, list(INFORMATIVE), begun if begun is not None else issued)
            self.the_slots_are_never_exceeded()
            self.no_informative_group_is_ever_stale()
        self.every_issued_group_is_active_or_has_one_fate()
        for group_id in list(self.ledger.active):
            self.ledger.settle(group_id, Fate.CANCELLED)
        written = [item for _, settled in self.journal for item in settled] + self.ledger.take_unwritten()
        assert sorted(item.group_id for item in written) == list(range(self.ledger.issued))
        assert Counter(item.fate for item in written) == +self.ledger.counts
        assert self.ledger.counts[Fate.TRAINED] <= self.steps * self.bsize


class CrashingJobSimulation(JobSimulation):
    """The same with a head that dies at any moment and starts again from its journal; a stale group is then allowed, a lost one never."""

    @rule()
    def the_learner_crashes(self) -> None:
        self.crashes += 1
        ledger = Ledger()
        for issued, settled in self.journal:
            ledger.replay(issued, settled)
        self.version = len(self.journal)
        for group in ledger.active.values():
            group.issue_version = max(0, self.version - self.k)
        self.intake = Intake(self.spec, ledger)
        self.undelivered = list(self.unacked.values())


TestJobSimulation = JobSimulation.TestCase
TestJobSimulation.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestCrashingJobSimulation = CrashingJobSimulation.TestCase
TestCrashingJobSimulation.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)
