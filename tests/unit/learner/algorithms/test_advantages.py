"""Advantages against the standard library's statistics, group by group."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.spec import AdvantageEstimator
from services.learner.algorithms.advantages import ESTIMATORS, batch_advantages

REWARDS = st.one_of(st.sampled_from([-1.0, 0.0, 1.0]), st.floats(-10.0, 10.0))
GROUPS = st.lists(st.lists(REWARDS, min_size=2, max_size=9), min_size=1, max_size=6)


def naive(groups: list[list[float]], estimator: AdvantageEstimator) -> list[list[float]]:
    centred = [[reward - statistics.fmean(group) for reward in group] for group in groups]
    match estimator:
        case AdvantageEstimator.GRPO:
            return [
                [(reward - statistics.fmean(group)) / (statistics.stdev(group) + 1e-6) for reward in group]
                for group in groups
            ]
        case AdvantageEstimator.DR_GRPO:
            return centred
        case AdvantageEstimator.RLOO:
            return [
                [reward - statistics.fmean(group[:i] + group[i + 1 :]) for i, reward in enumerate(group)]
                for group in groups
            ]
        case AdvantageEstimator.REINFORCE_PLUS_PLUS_BASELINE:
            spread = statistics.stdev([value for group in centred for value in group]) + 1e-6
            return [[value / spread for value in group] for group in centred]


def test_every_estimator_of_the_spec_is_registered() -> None:
    assert set(ESTIMATORS) == set(AdvantageEstimator)


@pytest.mark.parametrize("estimator", AdvantageEstimator)
@given(groups=GROUPS)
def test_advantages_equal_the_naive_statistics(estimator: AdvantageEstimator, groups: list[list[float]]) -> None:
    advantages = batch_advantages(groups, estimator)
    for ours, expected in zip(advantages, naive(groups, estimator), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-9, atol=1e-8)


@pytest.mark.parametrize("estimator", AdvantageEstimator)
@given(groups=GROUPS)
def test_the_advantages_of_a_group_sum_to_zero(estimator: AdvantageEstimator, groups: list[list[float]]) -> None:
    for advantages in batch_advantages(groups, estimator):
        assert abs(advantages.sum()) < 1e-8


@pytest.mark.parametrize("estimator", AdvantageEstimator)
def test_equal_rewards_give_no_advantage(estimator: AdvantageEstimator) -> None:
    for advantages in batch_advantages([[0.1] * 7, [0.1] * 3], estimator):
        np.testing.assert_allclose(advantages, 0.0, atol=1e-9)


def test_one_right_answer_of_four_has_the_advantages_worked_out_by_hand() -> None:
    rewards = [[1.0, 0.0, 0.0, 0.0]]  # mean 1/4; std with ddof 1: sqrt((9 + 1 + 1 + 1) / 16 / 3) = 1/2
    (advantages,) = batch_advantages(rewards, AdvantageEstimator.GRPO)
    np.testing.assert_allclose(advantages, [1.5, -0.5, -0.5, -0.5], rtol=1e-5)
    (advantages,) = batch_advantages(rewards, AdvantageEstimator.RLOO)
    np.testing.assert_allclose(advantages, [1.0, -1 / 3, -1 / 3, -1 / 3])


def test_the_baseline_is_the_groups_own_but_the_scale_is_the_batchs() -> None:
    easy, hard = batch_advantages([[1.0, 0.9], [0.0, 8.0]], AdvantageEstimator.REINFORCE_PLUS_PLUS_BASELINE)
    assert hard[1] / easy[0] == pytest.approx(4.0 / 0.05)


@pytest.mark.parametrize("estimator", AdvantageEstimator)
@pytest.mark.parametrize("broken", [[], [1.0], [1.0, float("nan")], [1.0, float("inf")]])
def test_a_group_without_a_baseline_is_named(estimator: AdvantageEstimator, broken: list[float]) -> None:
    with pytest.raises(ValueError, match="group 1 of the batch"):
        batch_advantages([[0.0, 1.0], broken], estimator)


@pytest.mark.parametrize("estimator", AdvantageEstimator)
def test_an_empty_batch_has_no_advantages(estimator: AdvantageEstimator) -> None:
    assert batch_advantages([], estimator) == []
