"""Estimators of the KL divergence, and the mismatch figures made of them, against exact sums."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.common.spec.choices import KlEstimator
from services.learner.algorithms.kl import kl_estimate
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
