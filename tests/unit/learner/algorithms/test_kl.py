"""Estimators of the KL divergence, and the mismatch figures made of them, against exact sums."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.common.spec.choices import KlEstimator
from services.learner.algorithms.kl import adapted_coefficient, kl_estimate, reference_kl
from services.learner.algorithms.losses import effective_sample_share, mismatch_metrics
from services.learner.algorithms.ratios import LOG_RATIO_BOUND


def two_policies(seed: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of two near policies over 50 tokens, float64."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(50, generator=generator, dtype=torch.float64)
    moved = logits + scale * torch.randn(50, generator=generator, dtype=torch.float64)
    return logits.log_softmax(0), moved.log_softmax(0)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("estimator", "tolerance"), [(KlEstimator.K1, 1e-12), (KlEstimator.K3, 1e-12), (KlEstimator.K2, 0.2)]
)
def test_the_expected_estimate_is_the_divergence(estimator: KlEstimator, tolerance: float, seed: int) -> None:
    q, p = two_policies(seed, 0.1)
    exact = sum(math.exp(a) * (a - b) for a, b in zip(q.tolist(), p.tolist(), strict=True))
    expected = (q.exp() * kl_estimate(estimator, p - q)).sum().item()
    assert expected == pytest.approx(exact, rel=tolerance)


@pytest.mark.parametrize("estimator", [KlEstimator.K1, KlEstimator.K3])
def test_the_expected_gradient_is_that_of_the_divergence(estimator: KlEstimator) -> None:
    q, p = two_policies(1, 0.5)
    logits = p.clone().requires_grad_()
    torch.autograd.backward((q.exp() * kl_estimate(estimator, logits.log_softmax(0) - q)).sum())
    torch.testing.assert_close(logits.grad, p.exp() - q.exp())  # ∇ KL(q ‖ softmax) = p − q


@given(st.floats(-20.0, 20.0))
def test_k2_and_k3_are_never_negative(x: float) -> None:
    for estimator in (KlEstimator.K2, KlEstimator.K3):
        assert kl_estimate(estimator, torch.tensor(x)).item() >= 0.0


@pytest.mark.parametrize("x", [1e-2, 1e-3, -1e-3, 1e-4])
def test_k3_of_nearly_equal_policies_is_not_rounded_away_in_float32(x: float) -> None:
    series = x**2 / 2 + x**3 / 6 + x**4 / 24
    assert kl_estimate(KlEstimator.K3, torch.tensor(x, dtype=torch.float32)).item() == pytest.approx(series, rel=5e-3)


def test_the_mismatch_figures_are_those_of_the_two_policies() -> None:
    trainer, inference = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.1, -1.5, -0.5])
    metrics = mismatch_metrics(trainer.requires_grad_(), inference)
    ratios = [math.exp(0.1), math.exp(-0.5), 1.0]
    torch.testing.assert_close(metrics["ratio"].tolist(), ratios, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(metrics["ratio_squared"].tolist(), [r * r for r in ratios], rtol=1e-6, atol=0.0)
    torch.testing.assert_close(metrics["mismatch_kl_k1"].tolist(), [-0.1, 0.5, 0.0], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(
        metrics["mismatch_kl_k3"].tolist(), [r - math.log(r) - 1 for r in ratios], rtol=1e-4, atol=1e-9
    )
    assert metrics["mean_abs_logprob_difference"].max().item() == pytest.approx(0.5)
    assert not any(value.requires_grad for value in metrics.values())


def test_a_difference_beyond_the_bound_is_reported_as_it_is_and_its_ratio_stays_finite() -> None:
    metrics = mismatch_metrics(torch.tensor([-1.0]), torch.tensor([-500.0]))
    assert metrics["mean_abs_logprob_difference"].item() == 499.0
    assert metrics["ratio"].item() == pytest.approx(math.exp(LOG_RATIO_BOUND), rel=1e-5)
    assert metrics["ratio_squared"].isfinite()


@pytest.mark.parametrize("distance", [60.0, -60.0, 1e4, -1e4])
def test_the_mismatch_figures_of_policies_far_apart_are_finite_in_float32(distance: float) -> None:
    for value in mismatch_metrics(torch.tensor([-1e4 - 1.0]), torch.tensor([-1e4 - 1.0 + distance])).values():
        assert value.dtype == torch.float32
        assert value.isfinite().all()


def test_the_effective_sample_share_runs_from_one_token_to_all() -> None:
    for ratios, expected in (([1.0] * 8, 1.0), ([3.0] * 8, 1.0), ([1.0] + [0.0] * 7, 1 / 8), ([1.0, 3.0], 0.8)):
        mean, squares = sum(ratios) / len(ratios), sum(r * r for r in ratios) / len(ratios)
        assert effective_sample_share(mean, squares) == pytest.approx(expected)
    assert effective_sample_share(0.0, 0.0) == 0.0


@pytest.mark.parametrize("estimator", KlEstimator)
@given(st.floats(-20.0, -1e-3), st.floats(-20.0, -1e-3))
def test_the_kl_to_a_reference_has_the_values_and_gradients_of_its_formula(
    estimator: KlEstimator, trainer: float, reference: float
) -> None:
    logprob = torch.tensor(trainer, dtype=torch.float64, requires_grad=True)
    value = reference_kl(estimator, logprob, torch.tensor(reference, dtype=torch.float64))
    torch.autograd.backward(value)
    x = reference - trainer
    values = {KlEstimator.K1: -x, KlEstimator.K2: x * x / 2, KlEstimator.K3: math.exp(x) - x - 1}
    gradients = {KlEstimator.K1: 1.0, KlEstimator.K2: -x, KlEstimator.K3: 1.0 - math.exp(x)}
    assert value.item() == pytest.approx(values[estimator], rel=1e-9, abs=1e-12)
    assert logprob.grad is not None
    assert logprob.grad.item() == pytest.approx(gradients[estimator], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("kl", "expected"),
    [(6.0, 0.2), (6.3, 0.2 * 1.005), (12.0, 0.2 * 1.02), (1e9, 0.2 * 1.02), (5.7, 0.2 * 0.995), (0.0, 0.2 * 0.98)],
)
def test_the_coefficient_grows_above_the_target_and_falls_below_at_most_a_fifth_over_the_horizon(
    kl: float, expected: float
) -> None:
    assert adapted_coefficient(0.2, kl, 1000, target=6.0, horizon=10_000) == pytest.approx(expected)


@given(st.floats(0.0, 1e3), st.integers(1, 10**6), st.floats(1e-6, 1e3), st.integers(1, 10**6))
def test_a_coefficient_is_never_negative(kl: float, responses: int, target: float, horizon: int) -> None:
    assert adapted_coefficient(0.1, kl, responses, target=target, horizon=horizon) >= 0.0


def test_a_kl_that_is_not_a_number_leaves_the_coefficient() -> None:
    assert adapted_coefficient(0.1, math.nan, 100, target=0.1, horizon=100) == 0.1
