"""Advantages of the tokens of whole batches, against naive loops over single tokens and against the path of single rollouts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.spec.algorithm import AlgorithmSpec
from services.common.spec.choices import AdvantageEstimator
from services.learner.algorithms.advantages import Estimate, Responses, estimate
from services.learner.algorithms.outcomes import batch_advantages
from tests.unit.learner.algorithms.responses import (
    TokenEstimate,
    naive_gae,
    naive_reinforce_plus_plus,
    random_responses,
)

OUTCOME = [estimator for estimator in AdvantageEstimator if estimator.compares_group]
PER_TOKEN = [estimator for estimator in AdvantageEstimator if not estimator.compares_group]
FACTORS = st.sampled_from([0.0, 0.5, 0.95, 1.0])
SEEDS = st.integers(0, 10_000)


def spec(estimator: AdvantageEstimator, **options: Any) -> AlgorithmSpec:
    return AlgorithmSpec(advantage_estimator=estimator, **options)


def check(found: Estimate, expected: list[TokenEstimate]) -> None:
    for place, naive in enumerate(expected):
        np.testing.assert_allclose(found.advantages[place], naive.advantages, rtol=1e-5, atol=1e-6)
        if found.returns is not None:
            np.testing.assert_allclose(found.returns[place], naive.returns, rtol=1e-6, atol=1e-6)


@settings(derandomize=True, deadline=None)
@given(seed=SEEDS, gamma=FACTORS, lam=FACTORS, penalties=st.booleans())
def test_gae_equals_the_naive_sum_over_later_tokens(seed: int, gamma: float, lam: float, penalties: bool) -> None:
    responses = random_responses(seed, penalties=penalties)
    found = estimate(responses, spec(AdvantageEstimator.GAE, gamma=gamma, lam=lam))
    assert found.returns is not None
    check(found, naive_gae(responses, gamma, lam))


@settings(derandomize=True, deadline=None)
@given(seed=SEEDS, gamma=FACTORS, penalties=st.booleans())
def test_reinforce_plus_plus_equals_the_naive_sum_over_later_tokens(seed: int, gamma: float, penalties: bool) -> None:
    responses = random_responses(seed, penalties=penalties, values=False)
    found = estimate(responses, spec(AdvantageEstimator.REINFORCE_PLUS_PLUS, gamma=gamma))
    assert found.returns is None
    check(found, naive_reinforce_plus_plus(responses, gamma))


@pytest.mark.parametrize("revision", [1, 2])
@pytest.mark.parametrize("estimator", OUTCOME)
@settings(derandomize=True, deadline=None)
@given(seed=SEEDS)
def test_without_penalties_a_rollouts_advantage_is_at_each_of_its_tokens_bit_for_bit(
    estimator: AdvantageEstimator, revision: int, seed: int
) -> None:
    responses = random_responses(seed, penalties=False, values=False)
    rewards: dict[int, list[float]] = {}
    lengths: dict[int, list[int]] = {}
    for group, reward, mask in zip(responses.group_ids, responses.rewards, responses.masks, strict=True):
        rewards.setdefault(group, []).append(reward)
        lengths.setdefault(group, []).append(int(mask.sum()) or len(mask))
    of_groups = batch_advantages(
        [np.array(group) for group in rewards.values()], estimator, list(lengths.values()), revision=revision
    )
    advantages = [advantage for group in of_groups for advantage in group]
    found = estimate(responses, spec(estimator, revision=revision))
    for ours, mask, expected in zip(found.advantages, responses.masks, advantages, strict=True):
        assert ours.dtype == np.float32
        assert ours.tobytes() == np.full(len(mask), float(expected), np.float32).tobytes()


@pytest.mark.parametrize("estimator", OUTCOME)
@pytest.mark.parametrize("seed", range(5))
def test_a_penalty_at_unmasked_tokens_is_part_of_the_outcome(estimator: AdvantageEstimator, seed: int) -> None:
    responses = random_responses(seed)
    assert responses.kl_penalties is not None
    outcomes = [
        reward - sum(float(p) for p, counts in zip(penalties, mask, strict=True) if counts)
        for reward, penalties, mask in zip(responses.rewards, responses.kl_penalties, responses.masks, strict=True)
    ]
    without = estimate(replace(responses, rewards=outcomes, kl_penalties=None), spec(estimator))
    found = estimate(responses, spec(estimator))
    for ours, expected in zip(found.advantages, without.advantages, strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


def test_a_response_without_a_token_counts_in_its_group_and_only_there() -> None:
    masks = [np.zeros(0, bool), np.ones(2, bool)]
    responses = Responses([3, 3], [2.0, 0.0], masks, values=[np.zeros(0, np.float32), np.zeros(2, np.float32)])
    assert [a.tolist() for a in estimate(responses, spec(AdvantageEstimator.DR_GRPO)).advantages] == [[], [-1.0, -1.0]]
    for estimator in PER_TOKEN:
        found = estimate(responses, spec(estimator))
        assert [a.tolist() for a in found.advantages] == [[], [0.0, 0.0]]


def test_a_response_that_is_masked_whole_counts_in_its_group_and_only_there() -> None:
    masks = [np.zeros(3, bool), np.ones(2, bool)]
    penalties = [np.full(3, np.nan), np.zeros(2)]
    values = [array.astype(np.float32) for array in penalties]
    responses = Responses([3, 3], [2.0, 0.0], masks, penalties, values)
    found = estimate(responses, spec(AdvantageEstimator.DR_GRPO))
    assert [a.tolist() for a in found.advantages] == [[1.0, 1.0, 1.0], [-1.0, -1.0]]
    for estimator in PER_TOKEN:
        assert [a.tolist() for a in estimate(responses, spec(estimator)).advantages] == [[0.0] * 3, [0.0] * 2]


@pytest.mark.parametrize("estimator", PER_TOKEN)
def test_a_single_token_is_only_centred_and_the_return_stays(estimator: AdvantageEstimator) -> None:
    mask = np.array([False, True, False])
    responses = Responses([1], [3.0], [mask], values=[np.array([9.0, 0.5, 9.0], np.float32)])
    found = estimate(responses, spec(estimator))
    assert found.advantages[0].tolist() == [0.0, 0.0, 0.0]
    if found.returns is not None:
        assert found.returns[0].tolist() == [0.0, 3.0, 0.0]


@pytest.mark.parametrize("estimator", PER_TOKEN)
def test_equal_rewards_and_lengths_give_no_advantage(estimator: AdvantageEstimator) -> None:
    responses = Responses([1, 1], [0.1, 0.1], [np.ones(1, bool)] * 2, values=[np.full(1, 0.3, np.float32)] * 2)
    for advantages in estimate(responses, spec(estimator)).advantages:
        np.testing.assert_allclose(advantages, 0.0, atol=1e-6)


@pytest.mark.parametrize("estimator", PER_TOKEN)
@pytest.mark.parametrize("seed", range(5))
def test_the_whitened_advantages_have_mean_0_and_variance_1_over_the_unmasked_tokens(
    estimator: AdvantageEstimator, seed: int
) -> None:
    responses = random_responses(seed, groups=20)
    found = estimate(responses, spec(estimator, gamma=0.9))
    counted = np.concatenate([a[m] for a, m in zip(found.advantages, responses.masks, strict=True)]).astype(np.float64)
    assert abs(counted.mean()) < 1e-6
    assert counted.var(ddof=1) == pytest.approx(1.0, rel=1e-5)
    assert not any(a[~m].any() for a, m in zip(found.advantages, responses.masks, strict=True))


@pytest.mark.parametrize("estimator", AdvantageEstimator)
@settings(derandomize=True, deadline=None, max_examples=30)
@given(seed=SEEDS)
def test_the_order_of_groups_and_of_their_responses_changes_nothing(estimator: AdvantageEstimator, seed: int) -> None:
    responses = random_responses(seed)
    assert responses.kl_penalties is not None
    assert responses.values is not None
    random = np.random.default_rng(seed)
    place_of = {group: place for place, group in enumerate(random.permutation(sorted(set(responses.group_ids))))}
    shuffled = random.permutation(len(responses.rewards)).tolist()
    order = sorted(shuffled, key=lambda i: place_of[responses.group_ids[i]])
    moved = Responses(
        [responses.group_ids[i] for i in order], [responses.rewards[i] for i in order], [responses.masks[i] for i in order],
        [responses.kl_penalties[i] for i in order], [responses.values[i] for i in order],
    )  # fmt: skip
    before, after = (estimate(which, spec(estimator, gamma=0.9, lam=0.8)) for which in (responses, moved))
    for place, i in enumerate(order):
        np.testing.assert_allclose(after.advantages[place], before.advantages[i], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("estimator", AdvantageEstimator)
def test_advantages_are_clipped_last_and_returns_never(estimator: AdvantageEstimator) -> None:
    responses = random_responses(3, groups=8)
    free, bounded = (estimate(responses, spec(estimator, advantage_clip=clip)) for clip in (None, 0.5))
    assert any((abs(values) > 0.5).any() for values in free.advantages)
    for ours, unclipped in zip(bounded.advantages, free.advantages, strict=True):
        assert ours.tolist() == np.clip(unclipped, -0.5, 0.5).tolist()
    assert (free.returns is None) is (bounded.returns is None)
    for ours, unclipped in zip(bounded.returns or [], free.returns or [], strict=True):
        assert ours.tolist() == unclipped.tolist()


@pytest.mark.parametrize("estimator", AdvantageEstimator)
def test_a_batch_of_no_responses_has_no_advantages(estimator: AdvantageEstimator) -> None:
    assert estimate(Responses([], [], [], [], []), spec(estimator)).advantages == []


def test_what_the_responses_lack_is_named() -> None:
    responses = random_responses(1)
    gae = spec(AdvantageEstimator.GAE)
    with pytest.raises(ValueError, match="gae needs the critic's value"):
        estimate(replace(responses, values=None), gae)
    with pytest.raises(ValueError, match="values are not one for each token"):
        estimate(replace(responses, values=[np.zeros(99, np.float32) for _ in responses.masks]), gae)
    with pytest.raises(ValueError, match="kl_penalties are not one for each token"):
        estimate(replace(responses, kl_penalties=[]), gae)
    with pytest.raises(ValueError, match="1 rewards for"):
        estimate(replace(responses, rewards=[1.0]), gae)
    with pytest.raises(ValueError, match="not finite"):
        estimate(replace(responses, rewards=[np.nan] * len(responses.rewards)), gae)


def test_a_group_of_one_is_refused_only_where_a_group_is_compared() -> None:
    responses = Responses([1, 2, 2], [1.0, 0.0, 1.0], [np.ones(2, bool)] * 3, values=[np.zeros(2, np.float32)] * 3)
    for estimator in AdvantageEstimator:
        if estimator.compares_group:
            with pytest.raises(ValueError, match="group 0 of the batch"):
                estimate(responses, spec(estimator))
        else:
            assert len(estimate(responses, spec(estimator)).advantages) == 3
