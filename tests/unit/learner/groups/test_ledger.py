"""Every issued group has exactly one fate, and the fates sum to the groups issued."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from services.common.jobs.fates import Fate
from services.learner.groups.ledger import MAX_REASONS, REASON_CHARS, REPORTED_REASONS, Ledger, Settled

FATES = st.sampled_from(list(Fate))


@given(st.lists(st.one_of(st.just("issue"), st.tuples(st.integers(0, 30), FATES)), max_size=80))
def test_the_fates_and_the_active_groups_always_sum_to_the_groups_issued(actions: list[str | tuple[int, Fate]]) -> None:
    ledger = Ledger()
    first: dict[int, Fate] = {}
    for action in actions:
        if isinstance(action, str):
            ledger.issue(policy_version=0)
            continue
        group_id, fate = action
        known = group_id < ledger.issued and group_id not in first
        assert ledger.settle(group_id, fate) is known
        if known:
            first[group_id] = fate
        assert sum(ledger.counts.values()) + len(ledger.active) == ledger.issued
    for fate in Fate:
        assert ledger.counts[fate] == sum(f is fate for f in first.values())
    assert all(group_id in first for group_id in range(ledger.frontier))


@given(st.lists(st.tuples(st.integers(0, 20), FATES), max_size=40))
def test_a_restored_ledger_knows_the_same_fates(actions: list[tuple[int, Fate]]) -> None:
    ledger = Ledger()
    ledger.reissue(21, policy_version=3)
    for group_id, fate in actions:
        ledger.settle(group_id, fate)
    again = Ledger.restore(json.loads(json.dumps(ledger.state())))
    assert again.summary() == ledger.summary()
    assert set(again.active) == set(ledger.active)
    assert again.frontier == ledger.frontier


def test_replaying_the_journal_gives_the_ledger_that_wrote_it() -> None:
    ledger, copy = Ledger(), Ledger()
    for _ in range(6):
        ledger.issue(policy_version=0)
    ledger.settle(4, Fate.DEGENERATE)
    ledger.settle(0, Fate.TRAINED)
    copy.replay(ledger.issued, ledger.take_unwritten())
    ledger.settle(1, Fate.FAILED, "no verdict")
    copy.replay(ledger.issued, ledger.take_unwritten())
    assert copy.state() == ledger.state()
    assert copy.take_unwritten() == []


def test_a_fate_that_no_record_has_yet_survives_a_checkpoint_and_is_in_the_next_record() -> None:
    ledger = Ledger()
    ledger.reissue(6, policy_version=0)
    ledger.settle(4, Fate.DEGENERATE)
    again = Ledger.restore(json.loads(json.dumps(ledger.state())))
    again.settle(1, Fate.FAILED, "why")
    assert again.take_unwritten() == [*ledger.take_unwritten(), Settled(1, Fate.FAILED, "why")]


def test_replaying_a_record_that_a_checkpoint_has_already_changes_nothing_but_what_is_left_to_write() -> None:
    ledger = Ledger()
    ledger.reissue(6, policy_version=0)
    ledger.settle(4, Fate.DEGENERATE)
    saved = json.loads(json.dumps(ledger.state()))
    written = ledger.take_unwritten()
    ledger.settle(5, Fate.STALE)
    again = Ledger.restore(saved)
    again.settle(5, Fate.STALE)
    again.replay(6, written)
    assert again.summary() == ledger.summary()
    assert again.take_unwritten() == [Settled(5, Fate.STALE)]


def test_failures_are_counted_by_reason_within_a_bound() -> None:
    ledger = Ledger()
    ledger.reissue(2000, policy_version=0)
    for group_id in range(1990):
        ledger.settle(group_id, Fate.FAILED, f"reason {group_id}")
    for group_id in range(1990, 2000):
        ledger.settle(group_id, Fate.FAILED, "x" * 10_000)
    assert ledger.newest_failure == "x" * REASON_CHARS
    assert ledger.failed_reasons.total() == 2000
    assert len(ledger.failed_reasons) <= MAX_REASONS + 1
    accounts = ledger.accounts()
    assert len(json.loads(accounts["failed_reasons"])) == REPORTED_REASONS
    assert json.loads(accounts["groups"])["failed"] == 2000
