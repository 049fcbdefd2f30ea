"""Sharing out the cores."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.cli.stack.plan import plan_cores


def test_on_two_cores_learner_and_rollout_have_one_each() -> None:
    plan = plan_cores([0, 1], 1)
    assert plan.rollout == (frozenset({0}),)
    assert plan.learner == {1}


def test_one_core_is_not_shared_out() -> None:
    plan = plan_cores([3], 2)
    assert plan.rollout == (frozenset(), frozenset())
    assert plan.learner == frozenset()


@given(st.sets(st.integers(0, 255), min_size=2), st.integers(0, 12))
def test_learner_and_servers_never_share_a_core(cores: set[int], servers: int) -> None:
    plan = plan_cores(sorted(cores), servers)
    assert len(plan.rollout) == servers
    assert plan.learner
    assert plan.learner <= cores
    for share in plan.rollout:
        assert share
        assert share <= cores - plan.learner


@given(st.integers(2, 256), st.integers(1, 12))
def test_servers_have_equal_separate_shares_where_there_are_enough(count: int, servers: int) -> None:
    shares = plan_cores(range(count), servers).rollout
    if count // 2 >= servers:
        assert len({len(share) for share in shares}) == 1
        assert sum(map(len, shares)) == len(frozenset().union(*shares))
