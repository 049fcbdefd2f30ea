"""The critic's loss against a naive loop, its explained variance, and a table of values that learns a known value function."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.spec.algorithm import AlgorithmSpec
from services.common.spec.choices import AdvantageEstimator
from services.learner.algorithms.advantages import Responses, estimate
from services.learner.algorithms.values import explained_variance, value_loss

NUMBERS = st.floats(-5.0, 5.0)
TOKENS = st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=20)
CLIPS = st.one_of(st.none(), st.floats(0.01, 3.0))


def naive(value: float, old: float, target: float, clip: float | None) -> tuple[float, bool]:
    square = (value - target) ** 2
    if clip is None:
        return square / 2, False
    clipped = (min(max(value, old - clip), old + clip) - target) ** 2
    return max(square, clipped) / 2, clipped > square


@settings(derandomize=True, deadline=None)
@given(TOKENS, CLIPS)
def test_each_tokens_loss_and_clip_equal_the_naive_ones(
    tokens: list[tuple[float, float, float]], clip: float | None
) -> None:
    values, old, returns = torch.tensor(tokens, dtype=torch.float64).T
    loss, clipped = value_loss(values, old, returns, clip)
    expected = [naive(*token, clip) for token in tokens]
    assert loss.tolist() == pytest.approx([value for value, _ in expected], rel=1e-12, abs=1e-15)
    assert clipped.tolist() == [which for _, which in expected]


@pytest.mark.parametrize("clip", [None, 0.2, 1.0])
@pytest.mark.parametrize("seed", range(5))
def test_the_gradient_is_that_of_differences_and_reaches_the_values_alone(clip: float | None, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values, old, returns = torch.randn(3, 50, generator=generator, dtype=torch.float64)
    values.requires_grad_()
    loss, clipped = value_loss(values, old, returns, clip)
    assert not clipped.requires_grad
    (gradient,) = torch.autograd.grad(loss.sum(), values)
    rows = torch.stack([values.detach(), old, returns]).T.tolist()
    expected = [(naive(v + 1e-6, o, r, clip)[0] - naive(v - 1e-6, o, r, clip)[0]) / 2e-6 for v, o, r in rows]
    assert gradient.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_a_value_that_went_far_enough_towards_its_return_gets_no_gradient() -> None:
    values = torch.tensor([0.5, 0.1, -0.5, 3.0], requires_grad=True)
    loss, clipped = value_loss(values, torch.zeros(4), torch.tensor([2.0, 2.0, 2.0, 2.0]), 0.2)
    torch.autograd.backward(loss.sum())
    assert clipped.tolist() == [True, False, False, True]
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([0.0, -1.9, -2.5, 0.0])


@settings(derandomize=True, deadline=None)
@given(st.lists(st.tuples(NUMBERS, NUMBERS, st.booleans()), min_size=1, max_size=20))
def test_the_explained_variance_is_that_of_the_naive_statistics(tokens: list[tuple[float, float, bool]]) -> None:
    values, returns, mask = (np.array(column) for column in zip(*tokens, strict=True))
    counted = [(value, target) for value, target, counts in tokens if counts]
    targets = [target for _, target in counted]
    if len(set(targets)) < 2 or statistics.pvariance(targets) < 1e-12:
        return
    rest = statistics.pvariance([target - value for value, target in counted])
    expected = 1.0 - rest / statistics.pvariance(targets)
    assert explained_variance(values, returns, mask) == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_the_edges_of_the_explained_variance() -> None:
    returns = np.array([1.0, 2.0, 3.0, np.nan])
    mask = np.array([True, True, True, False])
    assert explained_variance(returns, returns, mask) == 1.0
    assert explained_variance(returns + 5.0, returns, mask) == pytest.approx(1.0)  # a constant error is no variance
    assert explained_variance(np.full(4, 7.0), returns, mask) == pytest.approx(0.0)
    assert explained_variance(-returns, returns, mask) == pytest.approx(-3.0)
    assert explained_variance(returns, np.full(4, 0.1), mask) == 0.0
    assert explained_variance(returns, returns, np.zeros(4, bool)) == 0.0
    assert explained_variance(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]), torch.tensor([True, True])) == 1.0


STATES = 5
"""A random walk that starts in the middle and ends beyond either end, with reward 1 at the right: V(s) = (s + 1) / (STATES + 1)."""


def walks(random: np.random.Generator, count: int) -> list[tuple[list[int], float]]:
    """The states that each walk visits, and its reward."""
    found = []
    for _ in range(count):
        state, visited = STATES // 2, []
        while 0 <= state < STATES:
            visited.append(state)
            state += int(random.integers(2)) * 2 - 1
        found.append((visited, float(state == STATES)))
    return found


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("lam", [1.0, 0.8, 0.0])
def test_a_table_learns_the_value_function_of_a_random_walk(lam: float, clip: float | None) -> None:
    """Every second token is one of the environment: masked, with a value that means nothing."""
    random = np.random.default_rng(0)
    algorithm = AlgorithmSpec(advantage_estimator=AdvantageEstimator.GAE, lam=lam)
    table = torch.zeros(STATES, requires_grad=True)
    explained = 0.0
    for step in range(200):
        batch = walks(random, 60)
        values = [np.full(2 * len(states), 1e6, np.float32) for states, _ in batch]
        for of_walk, (states, _) in zip(values, batch, strict=True):
            of_walk[::2] = table.detach().numpy()[states]
        masks = [np.arange(len(of_walk)) % 2 == 0 for of_walk in values]
        responses = Responses(list(range(60)), [reward for _, reward in batch], masks, values=values)
        found = estimate(responses, algorithm)
        assert found.returns is not None
        mask = torch.from_numpy(np.concatenate(masks))
        visited = torch.tensor([state for states, _ in batch for state in states for _ in range(2)])
        old, returns = (torch.from_numpy(np.concatenate(arrays)) for arrays in (values, found.returns))
        loss, _ = value_loss(table[visited], torch.where(mask, old, 0.0), returns, clip)
        (gradient,) = torch.autograd.grad(torch.where(mask, loss, 0.0).sum() / mask.sum(), table)
        with torch.no_grad():
            table -= gradient * (2.0 if step < 150 else 0.2)
        explained = explained_variance(old, returns, mask)
    expected = torch.arange(1, STATES + 1) / (STATES + 1)
    torch.testing.assert_close(table.detach(), expected, rtol=0.0, atol=0.04)
    assert explained > 0.1
