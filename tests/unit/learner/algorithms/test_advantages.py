"""Advantages against the standard library's statistics, group by group."""

from __future__ import annotations

import math
import statistics

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.spec.choices import AdvantageEstimator
from services.learner.algorithms.outcomes import batch_advantages

OUTCOME = [estimator for estimator in AdvantageEstimator if estimator.compares_group]
REWARDS = st.one_of(st.sampled_from([-1.0, 0.0, 1.0]), st.floats(-10.0, 10.0))
GROUPS = st.lists(st.lists(REWARDS, min_size=2, max_size=9), min_size=1, max_size=6)


def naive(groups: list[list[float]], estimator: AdvantageEstimator) -> list[list[float]]:
    lengths = lengths_of(groups)
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
            everywhere = [
                value
                for group, sizes in zip(centred, lengths, strict=True)
                for value, size in zip(group, sizes, strict=True)
                for _ in range(size)
            ]
            mean, scale = statistics.fmean(everywhere), math.sqrt(statistics.variance(everywhere) + 1e-8)
            return [[(value - mean) / scale for value in group] for group in centred]
    raise AssertionError(f"{estimator} has no advantage of a whole rollout")


def lengths_of(groups: list[list[float]]) -> list[list[int]]:
    """Mixed response lengths, the same for equal groups."""
    return [[1 + (7 * place + 3 * i) % 11 for i in range(len(group))] for place, group in enumerate(groups)]


def advantages_of(
    groups: list[list[float]], estimator: AdvantageEstimator, **options: int
) -> list[npt.NDArray[np.float64]]:
    return batch_advantages(groups, estimator, lengths_of(groups), **options)


@pytest.mark.parametrize("estimator", OUTCOME)
@given(groups=GROUPS)
def test_advantages_equal_the_naive_statistics(estimator: AdvantageEstimator, groups: list[list[float]]) -> None:
    advantages = advantages_of(groups, estimator)
    for ours, expected in zip(advantages, naive(groups, estimator), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-9, atol=1e-8)


@pytest.mark.parametrize("estimator", sorted(set(OUTCOME) - {AdvantageEstimator.REINFORCE_PLUS_PLUS_BASELINE}))
@given(groups=GROUPS)
def test_the_advantages_of_a_group_sum_to_zero(estimator: AdvantageEstimator, groups: list[list[float]]) -> None:
    for advantages in advantages_of(groups, estimator):
        assert abs(advantages.sum()) < 1e-8


@pytest.mark.parametrize("estimator", OUTCOME)
def test_equal_rewards_give_no_advantage(estimator: AdvantageEstimator) -> None:
    for advantages in advantages_of([[0.1] * 7, [0.1] * 3], estimator):
        np.testing.assert_allclose(advantages, 0.0, atol=1e-9)


def test_one_right_answer_of_four_has_the_advantages_worked_out_by_hand() -> None:
    rewards = [[1.0, 0.0, 0.0, 0.0]]  # mean 1/4; std with ddof 1: sqrt((9 + 1 + 1 + 1) / 16 / 3) = 1/2
    (advantages,) = advantages_of(rewards, AdvantageEstimator.GRPO)
    np.testing.assert_allclose(advantages, [1.5, -0.5, -0.5, -0.5], rtol=1e-5)
    (advantages,) = advantages_of(rewards, AdvantageEstimator.RLOO)
    np.testing.assert_allclose(advantages, [1.0, -1 / 3, -1 / 3, -1 / 3])


REINFORCE = AdvantageEstimator.REINFORCE_PLUS_PLUS_BASELINE


def test_the_baseline_is_the_groups_own_but_the_scale_is_the_batchs() -> None:
    easy, hard = batch_advantages([[1.0, 0.9], [0.0, 8.0]], REINFORCE, [[3, 3], [3, 3]])
    assert hard[1] / easy[0] == pytest.approx(4.0 / 0.05)


def test_reinforce_plus_plus_is_whitened_over_tokens_so_that_long_rollouts_weigh_more() -> None:
    """Worked out by hand: 1 at one token and −1 at three have mean −1/2 and, with ddof 1, variance (9/4 + 3/4) / 3 = 1."""
    (advantages,) = batch_advantages([[2.0, 0.0]], REINFORCE, [[1, 3]])
    np.testing.assert_allclose(advantages, [1.5, -0.5], rtol=1e-7)
    (before,) = batch_advantages([[2.0, 0.0]], REINFORCE, [[1, 3]], revision=1)
    np.testing.assert_allclose(before, [1 / math.sqrt(2.0), -1 / math.sqrt(2.0)], rtol=1e-5)


@given(groups=GROUPS)
def test_over_all_tokens_of_the_batch_the_whitened_advantages_sum_to_zero(groups: list[list[float]]) -> None:
    pairs = zip(advantages_of(groups, REINFORCE), lengths_of(groups), strict=True)
    assert abs(sum(float(advantages @ np.array(sizes)) for advantages, sizes in pairs)) < 1e-5


@given(groups=GROUPS)
def test_revision_1_of_reinforce_plus_plus_divides_by_the_spread_over_rollouts(groups: list[list[float]]) -> None:
    centred = [[reward - statistics.fmean(group) for reward in group] for group in groups]
    spread = statistics.stdev([value for group in centred for value in group]) + 1e-6
    for ours, group in zip(advantages_of(groups, REINFORCE, revision=1), centred, strict=True):
        np.testing.assert_allclose(ours, [value / spread for value in group], rtol=1e-9, atol=1e-8)


def test_a_batch_of_no_tokens_is_centred_and_no_error() -> None:
    (advantages,) = batch_advantages([[1.0, 0.0]], REINFORCE, [[0, 0]])
    np.testing.assert_allclose(advantages, [0.5, -0.5])


def test_lengths_that_are_not_one_for_each_rollout_are_named() -> None:
    with pytest.raises(ValueError, match="group 1 of the batch has 2 rewards, and not as many lengths"):
        batch_advantages([[0.0, 1.0], [1.0, 0.0]], REINFORCE, [[3, 3], [3]])


@pytest.mark.parametrize("estimator", OUTCOME)
@pytest.mark.parametrize("broken", [[], [1.0], [1.0, float("nan")], [1.0, float("inf")]])
def test_a_group_without_a_baseline_is_named(estimator: AdvantageEstimator, broken: list[float]) -> None:
    with pytest.raises(ValueError, match="group 1 of the batch"):
        advantages_of([[0.0, 1.0], broken], estimator)


@pytest.mark.parametrize("estimator", OUTCOME)
def test_an_empty_batch_has_no_advantages(estimator: AdvantageEstimator) -> None:
    assert advantages_of([], estimator) == []
