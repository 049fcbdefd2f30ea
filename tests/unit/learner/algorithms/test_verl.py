"""Our formulas against verl's own functions, where verl is installed (it is no dependency: it needs Ray, and other versions of ours)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from services.common.spec.algorithm import AlgorithmSpec
from services.common.spec.choices import AdvantageEstimator, ImportanceCorrection, ImportanceLevel, KlEstimator
from services.learner.algorithms.advantages import Responses, estimate
from services.learner.algorithms.importance import importance_weights
from services.learner.algorithms.kl import adapted_coefficient, reference_kl
from services.learner.algorithms.values import value_loss
from tests.unit.learner.algorithms.responses import naive_token_rewards, random_responses

core_algos: Any = pytest.importorskip("verl.trainer.ppo.core_algos", exc_type=ImportError)
rollout_corr_helper: Any = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper", exc_type=ImportError)
SEEDS = range(10)


def padded(arrays: list[Any], longest: int) -> torch.Tensor:
    """float64 [N, longest], filled up with 0."""
    rows = [np.pad(np.asarray(array, np.float64), (0, longest - len(array))) for array in arrays]
    return torch.from_numpy(np.stack(rows))


def as_verl(responses: Responses) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Rewards of tokens and the mask, each [N, longest]."""
    longest = max(len(mask) for mask in responses.masks)
    rewards = [np.zeros(len(mask)) for mask in responses.masks]
    for i, mask in enumerate(responses.masks):
        rewards[i][mask] = naive_token_rewards(responses, i)
    return padded(rewards, longest), padded(list(responses.masks), longest), longest


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.5), (0.99, 0.0)])
def test_gae_is_verls(seed: int, gamma: float, lam: float) -> None:
    responses = random_responses(seed)
    rewards, mask, longest = as_verl(responses)
    assert responses.values is not None
    advantages, returns = core_algos.compute_gae_advantage_return(
        rewards, padded(list(responses.values), longest), mask, gamma, lam
    )
    found = estimate(responses, AlgorithmSpec(advantage_estimator=AdvantageEstimator.GAE, gamma=gamma, lam=lam))
    assert found.returns is not None
    for ours, theirs in ((found.advantages, advantages), (found.returns, returns)):
        torch.testing.assert_close(padded(list(ours), longest), theirs * mask, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_reinforce_plus_plus_is_verls(seed: int, gamma: float) -> None:
    responses = random_responses(seed, values=False)
    rewards, mask, longest = as_verl(responses)
    advantages, _ = core_algos.compute_reinforce_plus_plus_outcome_advantage(
        rewards, mask, config=SimpleNamespace(gamma=gamma)
    )
    algorithm = AlgorithmSpec(advantage_estimator=AdvantageEstimator.REINFORCE_PLUS_PLUS, gamma=gamma)
    found = padded(list(estimate(responses, algorithm).advantages), longest)
    torch.testing.assert_close(found, advantages, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_value_loss_and_its_gradient_are_verls(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values, old, returns = torch.randn(3, 4, 9, generator=generator, dtype=torch.float64)
    mask = (torch.rand(4, 9, generator=generator) < 0.8).double()
    values.requires_grad_()
    theirs, share = core_algos.compute_value_loss(values, returns, old, mask, 0.5)
    loss, clipped = value_loss(values, old, returns, 0.5)
    ours = (loss * mask).sum() / mask.sum()
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close((clipped * mask).sum() / mask.sum(), share.double(), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(torch.autograd.grad(ours, values), torch.autograd.grad(theirs, values))


@pytest.mark.parametrize("kl", [0.0, 0.05, 0.099, 0.1, 0.11, 7.0])
def test_the_adaptive_coefficient_is_verls(kl: float) -> None:
    theirs = core_algos.AdaptiveKLController(0.2, 0.1, 10_000)
    ours = 0.2
    for responses in (512, 64, 2048):
        theirs.update(kl, responses)
        ours = adapted_coefficient(ours, kl, responses, target=0.1, horizon=10_000)
        assert ours == pytest.approx(theirs.value, rel=1e-12)


@pytest.mark.parametrize("estimator", KlEstimator)
def test_the_kl_to_a_reference_is_verls(estimator: KlEstimator) -> None:
    generator = torch.Generator().manual_seed(1)
    trainer, reference = -torch.rand(2, 100, generator=generator, dtype=torch.float64) * 2
    theirs = core_algos.kl_penalty_forward(trainer, reference, estimator.value)
    torch.testing.assert_close(reference_kl(estimator, trainer, reference), theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("level", [ImportanceLevel.TOKEN, ImportanceLevel.SEQUENCE])
@pytest.mark.parametrize(("floor", "cap"), [(None, 1.4), (0.5, 2.0)])
def test_importance_weights_are_verls(level: ImportanceLevel, floor: float | None, cap: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    log_ratio = torch.randn(5, 6, generator=generator, dtype=torch.float64) * 0.4
    mask = torch.rand(5, 6, generator=generator) < 0.8
    threshold = cap if floor is None else f"{floor}_{cap}"
    theirs, _ = rollout_corr_helper.compute_rollout_correction_weights(log_ratio, mask, level.value, threshold)
    algorithm = AlgorithmSpec(
        importance_correction=ImportanceCorrection.TRUNCATED if floor is None else ImportanceCorrection.MASKED,
        importance_level=level, importance_weight_cap=cap, importance_weight_floor=floor or 0.0,
    )  # fmt: skip
    known = torch.where(mask, log_ratio, 0.0).flatten()
    ids = torch.arange(5).repeat_interleave(6)
    ours, _ = importance_weights(known, torch.zeros_like(known), algorithm, mask=mask.flatten(), sequence_ids=ids)
    torch.testing.assert_close(ours.view(5, 6) * mask, theirs.double(), rtol=1e-9, atol=1e-9)
