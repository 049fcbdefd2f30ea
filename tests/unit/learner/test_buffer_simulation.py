"""A simulation of a whole job around the buffer, crashes included, that tries to lose a group, train it twice or too late, or hang."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.common.jobs.fates import Fate
from services.learner.groups.buffer import GroupBuffer, Judged
from services.learner.groups.ledger import Ledger, Settled
from tests.unit.learner.scored_groups import DEGENERATE, INFORMATIVE, LIMITS, judged_group, make_spec


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
        self.buffer = GroupBuffer(self.spec, LIMITS, Ledger())
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
        return self.buffer.ledger

    def issue_up_to(self, share: float = 1.0) -> None:
        for _ in range(math.ceil(self.buffer.budget(self.steps - self.version) * share)):
            group = self.ledger.issue(self.version)
            if group.group_id not in self.known:
                self.known.add(group.group_id)
                self.in_flight[group.group_id] = (self.version, None)

    def come_back(
        self, group_id: int, rewards: Sequence[float | None], oldest: int, failure: str | None = None
    ) -> None:
        del self.in_flight[group_id]
        judged = judged_group(group_id, [] if failure else rewards, versions=(oldest,), failure=failure, permanent=True)
        self.unacked[group_id] = judged
        if self.undelivered:
            self.undelivered.append(judged)
        else:
            self.buffer.arrived(judged)

    def redeliver(self) -> None:
        self.buffer.arrived(self.undelivered.pop(0))

    def step_begins(self) -> bool:
        chosen = self.buffer.select(self.version)
        if chosen is None:
            return False
        ages = [self.version - judged.scored.group.min_policy_version for judged in chosen]
        assert all(0 <= age <= self.k for age in ages)
        assert 1 <= len(chosen) <= self.bsize
        assert len(chosen) == self.bsize or self.buffer.judged_since_step >= self.max_batches * self.bsize
        self.buffer.begin_training(chosen)
        self.journal.append((self.ledger.issued, self.ledger.take_unwritten()))
        for judged in self.buffer.take_settled():
            self.unacked.pop(judged.group_id, None)
        return True

    def step_ends(self) -> None:
        self.version += 1
        self.buffer.published()

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
        rewards = {"informative": INFORMATIVE, "degenerate": DEGENERATE}.get(outcome, (1.0, None))
        self.come_back(group_id, rewards, oldest, "no such task" if outcome == "failed" else None)

    @precondition(lambda self: self.unacked)
    @rule(data=st.data())
    def a_group_comes_back_once_more(self, data: st.DataObject) -> None:
        group_id = data.draw(st.sampled_from(sorted(self.unacked)))
        if self.unacked[group_id] in self.undelivered:
            return
        before = self.ledger.summary(), self.buffer.ready, self.buffer.accept_rate.value
        assert self.buffer.arrived(judged_group(group_id, DEGENERATE)) is None
        assert (self.ledger.summary(), self.buffer.ready, self.buffer.accept_rate.value) == before

    @precondition(lambda self: not self.buffer.step_under_way and self.version < self.steps)
    @rule()
    def a_step_begins(self) -> None:
        self.step_begins()

    @precondition(lambda self: self.buffer.step_under_way)
    @rule()
    def a_step_ends(self) -> None:
        self.step_ends()

    @precondition(lambda self: self.undelivered)
    @rule()
    def an_entry_is_delivered_again(self) -> None:
        self.redeliver()

    @invariant()
    def the_slots_are_never_exceeded(self) -> None:
        taken = len(self.ledger.active) + (self.bsize if self.buffer.step_under_way else 0)
        assert self.crashes or taken <= self.spec.slots

    @invariant()
    def no_informative_group_is_ever_stale(self) -> None:
        assert self.crashes or not self.ledger.counts[Fate.STALE]
        for group in () if self.crashes else self.ledger.active.values():
            assert self.version - group.issue_version <= self.k

    @invariant()
    def every_issued_group_is_active_or_has_one_fate(self) -> None:
        assert sum(self.ledger.counts.values()) + len(self.ledger.active) == self.ledger.issued
        assert self.buffer.ready == sum(group.ready for group in self.ledger.active.values())

    def teardown(self) -> None:
        """From wherever the levers were left, the job runs to its end, and every group has one fate in the journal."""
        if not hasattr(self, "buffer"):
            return
        turns = 0
        while self.version < self.steps:
            turns += 1
            assert turns < 10_000, "the job hangs"
            if self.buffer.step_under_way:
                self.step_ends()
            elif not self.step_begins():
                self.issue_up_to()
                assert self.in_flight or self.undelivered, "nothing is in flight, no step can go and no task be issued"
                while self.undelivered:
                    self.redeliver()
                for group_id in sorted(self.in_flight):
                    issued, begun = self.in_flight[group_id]
                    self.come_back(group_id, INFORMATIVE, begun if begun is not None else issued)
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
        self.buffer = GroupBuffer(self.spec, LIMITS, ledger)
        self.undelivered = list(self.unacked.values())


TestJobSimulation = JobSimulation.TestCase
TestJobSimulation.settings = settings(max_examples=60, stateful_step_count=50)
TestCrashingJobSimulation = CrashingJobSimulation.TestCase
TestCrashingJobSimulation.settings = settings(max_examples=40, stateful_step_count=50)
