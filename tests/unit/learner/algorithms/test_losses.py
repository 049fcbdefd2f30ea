"""Losses and gradients against a naive loop over tokens, gradcheck, and every way to split a batch."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as profile
from hypothesis import strategies as st

from services.common.spec.algorithm import AlgorithmSpec
from services.common.spec.choices import ImportanceCorrection, ImportanceLevel, KlEstimator, KlPlacement, LossName
from services.learner.algorithms.losses import LossInputs, make_loss
from tests.unit.learner.algorithms.references import (
    Token,
    kink_distance,
    naive_gradient,
    naive_total,
    random_tokens,
    to_inputs,
    totals,
)

TRUNCATED: dict[str, Any] = {"importance_correction": ImportanceCorrection.TRUNCATED, "importance_weight_cap": 1.4}
MASKED: dict[str, Any] = {
    "importance_correction": ImportanceCorrection.MASKED, "importance_weight_floor": 0.6, "importance_weight_cap": 1.5
}  # fmt: skip
DECOUPLED: dict[str, Any] = {"importance_correction": ImportanceCorrection.DECOUPLED}
M2PO: dict[str, Any] = {"importance_correction": ImportanceCorrection.M2PO, "importance_m2_threshold": 0.04}
SURROGATE: dict[str, Any] = {"loss": LossName.SURROGATE}
SEQUENCE: dict[str, Any] = {"importance_level": ImportanceLevel.SEQUENCE}
GEOMETRIC: dict[str, Any] = {"importance_level": ImportanceLevel.GEOMETRIC}
REFERENCE: dict[str, Any] = {"kl_coefficient": 0.3}
ENTROPY: dict[str, Any] = {"entropy_coefficient": 0.05}

GSPO: dict[str, Any] = {
    "loss": LossName.GSPO, "token_level_loss": False, "clip_ratio_low": 0.05, "clip_ratio_high": 0.08
}  # fmt: skip

TOKEN_MEAN: dict[str, AlgorithmSpec] = {
    "dapo": AlgorithmSpec(),
    "ppo": AlgorithmSpec(clip_ratio_high=0.2),
    "dual_clip": AlgorithmSpec(dual_clip=1.5),
    "decoupled": AlgorithmSpec(**DECOUPLED),
    "truncated": AlgorithmSpec(**TRUNCATED),
    "masked": AlgorithmSpec(**MASKED),
    "k1": AlgorithmSpec(proximal_kl_coefficient=0.1, proximal_kl_estimator=KlEstimator.K1),
    "k2": AlgorithmSpec(proximal_kl_coefficient=0.1, proximal_kl_estimator=KlEstimator.K2),
    "k3_truncated": AlgorithmSpec(proximal_kl_coefficient=0.1, **TRUNCATED),
    "cispo": AlgorithmSpec(loss=LossName.CISPO),
    "surrogate": AlgorithmSpec(**SURROGATE),
    "m2po": AlgorithmSpec(**SURROGATE, **M2PO),
    "m2po_clipped": AlgorithmSpec(**M2PO),
    "reference_k1": AlgorithmSpec(**REFERENCE, kl_estimator=KlEstimator.K1),
    "reference_k2": AlgorithmSpec(**REFERENCE, kl_estimator=KlEstimator.K2),
    "reference_k3": AlgorithmSpec(**REFERENCE),
    "reference_in_the_reward": AlgorithmSpec(**REFERENCE, kl_placement=KlPlacement.REWARD),
    "entropy": AlgorithmSpec(**ENTROPY),
    "masked_and_regularized": AlgorithmSpec(**MASKED, **REFERENCE, **ENTROPY, proximal_kl_coefficient=0.1),
}
SEQUENCE_MEAN: dict[str, AlgorithmSpec] = {
    "dapo_sequence_mean": AlgorithmSpec(token_level_loss=False),
    "dr_grpo": AlgorithmSpec(token_level_loss=False, constant_length=16),
    "gspo": AlgorithmSpec(**GSPO),
    "gspo_masked": AlgorithmSpec(**GSPO, **MASKED),
    "gspo_revision_1": AlgorithmSpec(**GSPO, revision=1),
    "gspo_masked_revision_1": AlgorithmSpec(**GSPO, **MASKED, revision=1),
    "cispo_sequence_mean": AlgorithmSpec(loss=LossName.CISPO, token_level_loss=False),
    "decoupled_sequences": AlgorithmSpec(**DECOUPLED, **SEQUENCE),
    "truncated_sequences": AlgorithmSpec(**TRUNCATED, **SEQUENCE),
    "masked_sequences": AlgorithmSpec(**MASKED, **SEQUENCE, **REFERENCE, **ENTROPY),
    "decoupled_geometric": AlgorithmSpec(**DECOUPLED, **GEOMETRIC, token_level_loss=False),
    "truncated_geometric": AlgorithmSpec(**TRUNCATED, **GEOMETRIC),
    "masked_geometric": AlgorithmSpec(**MASKED, **GEOMETRIC),
    "regularized_sequence_mean": AlgorithmSpec(**REFERENCE, **ENTROPY, token_level_loss=False),
}
ALL = TOKEN_MEAN | SEQUENCE_MEAN


def with_kl(inputs: LossInputs, algorithm: AlgorithmSpec) -> LossInputs:
    """The inputs with a β that is not adapted."""
    return replace(inputs, kl_coefficient=algorithm.kl_coefficient)


def total_and_gradient(inputs: LossInputs, algorithm: AlgorithmSpec) -> tuple[float, torch.Tensor]:
    """What the trainer makes of a micro-batch: the unmasked token losses, summed and divided by the global token count."""
    token_loss, _ = make_loss(algorithm)(with_kl(inputs, algorithm))
    total = torch.where(inputs.loss_mask, token_loss, 0.0).sum() / inputs.global_tokens
    gradient: torch.Tensor = torch.autograd.grad(total, inputs.trainer_logprobs)[0]
    return total.item(), gradient


def smooth_tokens(seed: int, algorithm: AlgorithmSpec) -> list[Token]:
    """Random tokens with no ratio at a bound."""
    for attempt in range(100):
        tokens = random_tokens(seed * 100 + attempt)
        if kink_distance(tokens, algorithm) > 1e-4 and any(token.counts for token in tokens):
            return tokens
    raise AssertionError("no smooth batch found")


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("algorithm", ALL.values(), ids=ALL.keys())
def test_loss_and_gradient_equal_the_naive_loop(algorithm: AlgorithmSpec, seed: int) -> None:
    tokens = smooth_tokens(seed, algorithm)
    total, gradient = total_and_gradient(to_inputs(tokens), algorithm)
    assert total == pytest.approx(naive_total(tokens, algorithm), rel=1e-12, abs=1e-13)
    torch.testing.assert_close(gradient.tolist(), naive_gradient(tokens, algorithm), rtol=1e-6, atol=1e-9)


DIFFERENTIABLE = {name: spec for name, spec in ALL.items() if name not in {"gspo", "gspo_masked"}}
"""All but those that hold the rest of a sequence still on purpose."""


@pytest.mark.parametrize("algorithm", DIFFERENTIABLE.values(), ids=DIFFERENTIABLE.keys())
def test_the_gradient_is_that_of_the_value(algorithm: AlgorithmSpec) -> None:
    if (
        algorithm.loss is LossName.CISPO
    ):  # its weight is a constant on purpose: freeze it by making the ratio independent of the input
        algorithm = algorithm.model_copy(update={"clip_ratio_high": 0.0})
    tokens = smooth_tokens(3, algorithm)
    if algorithm.loss is LossName.CISPO:
        tokens = [replace(token, old=token.trainer - 1.0) for token in tokens]
    inputs = to_inputs(tokens)

    def value(trainer: torch.Tensor) -> torch.Tensor:
        return make_loss(algorithm)(replace(with_kl(inputs, algorithm), trainer_logprobs=trainer))[0]

    assert torch.autograd.gradcheck(value, (inputs.trainer_logprobs,))


@pytest.mark.parametrize("name", TOKEN_MEAN)
@profile(max_examples=40)
@given(seed=st.integers(0, 10_000), data=st.data())
def test_a_token_mean_does_not_depend_on_where_the_tokens_are_split(name: str, seed: int, data: st.DataObject) -> None:
    tokens = random_tokens(seed)
    parts = data.draw(st.lists(st.integers(0, 3), min_size=len(tokens), max_size=len(tokens)))
    check_split(tokens, parts, TOKEN_MEAN[name])


@pytest.mark.parametrize("name", SEQUENCE_MEAN)
@profile(max_examples=40)
@given(seed=st.integers(0, 10_000), data=st.data())
def test_a_sequence_mean_does_not_depend_on_where_the_sequences_go(name: str, seed: int, data: st.DataObject) -> None:
    tokens = random_tokens(seed, lengths=(4, 1, 6, 2, 3))
    of_sequence = data.draw(st.lists(st.integers(0, 3), min_size=5, max_size=5))
    check_split(tokens, [of_sequence[token.sequence] for token in tokens], SEQUENCE_MEAN[name])


def check_split(tokens: list[Token], parts: list[int], algorithm: AlgorithmSpec) -> None:
    """Sums the losses of the parts in float32, as the trainer does, and compares with the batch in one piece."""
    whole, whole_gradient = total_and_gradient(to_inputs(tokens, dtype=torch.float32), algorithm)
    batch_totals = totals(tokens)
    summed, gradient = 0.0, torch.zeros(len(tokens))
    for part in sorted(set(parts)):
        places = [place for place, of in enumerate(parts) if of == part]
        inputs = to_inputs([tokens[place] for place in places], batch_totals, torch.float32)
        part_total, part_gradient = total_and_gradient(inputs, algorithm)
        summed += part_total
        gradient[places] = part_gradient
    scale = sum(map(abs, make_loss(algorithm)(with_kl(to_inputs(tokens), algorithm))[0].tolist())) / batch_totals[0]
    assert abs(summed - whole) <= 1e-6 * max(scale, 1e-6)
    assert (gradient - whole_gradient).norm() <= 1e-6 * whole_gradient.norm()


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("algorithm", ALL.values(), ids=ALL.keys())
def test_what_a_masked_token_holds_changes_nothing(algorithm: AlgorithmSpec, garbage: float) -> None:
    tokens = smooth_tokens(5, algorithm)
    spoilt = [
        t if t.counts else Token(garbage, garbage, garbage, garbage, False, t.sequence, garbage, garbage, not t.kept)
        for t in tokens
    ]
    assert spoilt != tokens
    total, gradient = total_and_gradient(to_inputs(tokens), algorithm)
    spoilt_total, spoilt_gradient = total_and_gradient(to_inputs(spoilt), algorithm)
    assert spoilt_total == total
    assert torch.equal(spoilt_gradient, gradient)
    inputs = with_kl(to_inputs(spoilt), algorithm)
    token_loss, metrics = make_loss(algorithm)(inputs)
    masked = ~inputs.loss_mask
    for values in (spoilt_gradient, token_loss, *metrics.values()):
        assert (values[masked] == 0.0).all()


@pytest.mark.parametrize("algorithm", ALL.values(), ids=ALL.keys())
def test_an_empty_micro_batch_adds_nothing(algorithm: AlgorithmSpec) -> None:
    total, gradient = total_and_gradient(
        to_inputs([Token(0.0, 0.0, 0.0, 0.0, False, 0)], (100, 7), torch.float32), algorithm
    )
    assert total == 0.0
    assert gradient.tolist() == [0.0]


@pytest.mark.parametrize("algorithm", ALL.values(), ids=ALL.keys())
@pytest.mark.parametrize("distance", [60.0, -60.0, 1e4, -1e4])
def test_policies_far_apart_give_finite_losses_in_float32(algorithm: AlgorithmSpec, distance: float) -> None:
    tokens = [
        Token(-1e4 - 1.0, -1e4 - 1.0 - distance, -1e4 - 1.0 + 2 * distance, sign, True, place, -1e4 - 1.0 - distance)
        for place, sign in enumerate((1.0, -1.0))
    ]
    inputs = with_kl(to_inputs(tokens, dtype=torch.float32), algorithm)
    token_loss, metrics = make_loss(algorithm)(inputs)
    (gradient,) = torch.autograd.grad(token_loss.sum(), inputs.trainer_logprobs)
    for values in (token_loss, gradient, *metrics.values()):
        assert values.isfinite().all()


def gradient_at(ratio: float, advantage: float, algorithm: AlgorithmSpec) -> float:
    """Gradient of one token's loss in its log-prob."""
    token = Token(-1.0, -1.0 - math.log(ratio), -1.0, advantage, True, 0)
    return total_and_gradient(to_inputs([token]), algorithm)[1].item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.281, 1.0, 0.0),  # good enough already: no gradient above 1 + high
        (1.279, 1.0, -1.279),  # clip-higher leaves room that 1.2 would not
        (0.5, 1.0, -0.5),  # a good token that became rare is always pulled back
        (0.799, -1.0, 0.0),  # rare enough already: no gradient below 1 − low
        (0.801, -1.0, 0.801),
        (50.0, -1.0, 50.0),  # a bad token that became likely keeps its whole gradient
        (1.5, 0.0, 0.0),
    ],
)
def test_clip_higher_cuts_the_gradient_only_where_the_policy_has_gone_far_enough(
    ratio: float, advantage: float, expected: float
) -> None:
    assert gradient_at(ratio, advantage, AlgorithmSpec()) == pytest.approx(expected)


@pytest.mark.parametrize(("ratio", "expected"), [(50.0, 0.0), (3.001, 0.0), (2.999, 2.999), (0.5, 0.0)])
def test_the_dual_clip_also_cuts_a_bad_token_that_became_far_too_likely(ratio: float, expected: float) -> None:
    assert gradient_at(ratio, -1.0, AlgorithmSpec(dual_clip=3.0)) == pytest.approx(expected)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_cispo_caps_the_weight_but_keeps_every_tokens_gradient(advantage: float) -> None:
    algorithm = AlgorithmSpec(loss=LossName.CISPO)
    assert gradient_at(50.0, advantage, algorithm) == pytest.approx(-1.28 * advantage)
    assert gradient_at(0.01, advantage, algorithm) == pytest.approx(-0.01 * advantage)


@pytest.mark.parametrize("loss", [LossName.DAPO, LossName.CISPO])
def test_on_policy_the_gradient_is_that_of_reinforce(loss: LossName) -> None:
    tokens = [replace(token, old=token.trainer) for token in random_tokens(11)]
    inputs = to_inputs(tokens)
    _, gradient = total_and_gradient(inputs, AlgorithmSpec(loss=loss))
    torch.testing.assert_close(gradient, -inputs.advantages * inputs.loss_mask / inputs.global_tokens)


def test_gspo_gives_all_tokens_of_a_sequence_the_same_gradient() -> None:
    tokens = random_tokens(2, lengths=(6,), masked_share=0.0, spread=0.001)
    algorithm = SEQUENCE_MEAN["gspo"].model_copy(update={"clip_ratio_low": 0.9, "clip_ratio_high": 9.0})
    _, gradient = total_and_gradient(to_inputs(tokens), algorithm)
    assert gradient.abs().min() > 0.0
    assert (gradient - gradient[0]).abs().max() < 1e-15


def test_clip_fractions_count_the_tokens_whose_gradient_is_cut_by_the_sign_of_the_advantage() -> None:
    ratios = [(1.5, 1.0), (1.2, 1.0), (0.5, 1.0), (0.5, -1.0), (0.7, -1.0), (1.5, -1.0), (4.0, -1.0), (4.0, 1.0)]
    tokens = [Token(-1.0, -1.0 - math.log(r), -1.0, a, True, place) for place, (r, a) in enumerate(ratios)]
    _, metrics = make_loss(AlgorithmSpec(dual_clip=3.0))(to_inputs(tokens))
    assert metrics["clip_fraction_high"].tolist() == [1, 0, 0, 0, 0, 0, 0, 1]
    assert metrics["clip_fraction_low"].tolist() == [0, 0, 0, 1, 1, 0, 0, 0]
    assert metrics["clip_fraction_dual"].tolist() == [0, 0, 0, 0, 0, 0, 1, 0]


def test_mask_fractions_count_the_tokens_outside_the_band_and_the_denominator_stays() -> None:
    weights = [(2.0, 1.0), (1.0, 1.0), (0.1, -1.0), (1.2, -1.0)]
    tokens = [Token(-1.0, -1.0, -1.0 - math.log(w), a, True, place) for place, (w, a) in enumerate(weights)]
    algorithm = ALL["masked"]
    token_loss, metrics = make_loss(algorithm)(to_inputs(tokens))
    assert metrics["mask_fraction_positive"].tolist() == [1, 0, 0, 0]
    assert metrics["mask_fraction_negative"].tolist() == [0, 0, 1, 0]
    torch.testing.assert_close(metrics["importance_weight"].tolist(), [0.0, 1.0, 0.0, 1.2])
    assert token_loss.sum().item() / 4 == pytest.approx((-1.0 + 1.2) / 4)


@pytest.mark.parametrize("algorithm", ALL.values(), ids=ALL.keys())
def test_only_the_trainers_logprobs_and_a_wanted_entropy_get_a_gradient_and_metrics_get_none(
    algorithm: AlgorithmSpec,
) -> None:
    inputs = with_kl(to_inputs(smooth_tokens(7, algorithm)), algorithm)
    for field in fields(inputs):
        value = getattr(inputs, field.name)
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            value.requires_grad_()
    token_loss, metrics = make_loss(algorithm)(inputs)
    torch.autograd.backward(token_loss.sum())
    assert inputs.trainer_logprobs.grad is not None
    assert (inputs.entropy.grad is not None) is (algorithm.entropy_coefficient > 0.0)
    assert inputs.reference_logprobs is not None
    for other in (inputs.old_logprobs, inputs.inference_logprobs, inputs.advantages, inputs.reference_logprobs):
        assert other.grad is None
    assert not any(value.requires_grad for value in metrics.values())
    assert all(value.shape == token_loss.shape and value.dtype == token_loss.dtype for value in metrics.values())


@pytest.mark.parametrize("name", ["entropy", "masked_and_regularized", "masked_sequences", "regularized_sequence_mean"])
@pytest.mark.parametrize("seed", range(3))
def test_the_gradient_of_an_entropy_is_that_of_the_naive_loop(name: str, seed: int) -> None:
    algorithm = ALL[name]
    tokens = smooth_tokens(seed, algorithm)
    inputs = with_kl(to_inputs(tokens), algorithm)
    token_loss, _ = make_loss(algorithm)(inputs)
    (gradient,) = torch.autograd.grad(token_loss.sum() / inputs.global_tokens, inputs.entropy)
    expected = []
    for place, token in enumerate(tokens):
        up, down = (
            [*tokens[:place], replace(token, entropy=token.entropy + step), *tokens[place + 1 :]]
            for step in (0.5, -0.5)
        )
        expected.append(naive_total(up, algorithm) - naive_total(down, algorithm))  # it is linear
    torch.testing.assert_close(gradient.tolist(), expected, rtol=1e-9, atol=1e-12)
    assert gradient.abs().max() > 0.0


def correction_case(correction: str, revision: int = 2, **bounds: float) -> list[float]:
    """Gradients of a sequence of four tokens, A = 1, weights 1, 1, 1, e⁵, at the start of a step."""
    algorithm = AlgorithmSpec.model_validate(
        {"loss": "gspo", "token_level_loss": False, "importance_correction": correction, "revision": revision} | bounds
    )
    tokens = [Token(-6.0, -6.0, -6.0 - log_weight, 1.0, True, 0) for log_weight in (0.0, 0.0, 0.0, 5.0)]
    gradient: list[float] = total_and_gradient(to_inputs(tokens), algorithm)[1].tolist()
    return gradient


def test_gspo_takes_a_masked_tokens_gradient_away_and_no_other_tokens() -> None:
    assert correction_case("masked", importance_weight_cap=2.0) == pytest.approx([-0.25, -0.25, -0.25, 0.0], abs=1e-12)
    assert correction_case("truncated", importance_weight_cap=2.0) == pytest.approx([-0.25] * 3 + [-0.5])
    assert correction_case("decoupled") == pytest.approx([-0.25] * 3 + [-0.25 * math.exp(5.0)])


def test_revision_1_of_gspo_spreads_a_tokens_weight_over_the_sequence_as_it_did() -> None:
    masked = correction_case("masked", revision=1, importance_weight_cap=2.0)
    assert masked == pytest.approx([-0.1875] * 4)
    assert correction_case("decoupled", revision=1) == pytest.approx([-(3 + math.exp(5.0)) / 16] * 4)


@pytest.mark.parametrize("seed", range(5))
def test_without_a_correction_both_revisions_of_gspo_have_the_same_losses_and_gradients(seed: int) -> None:
    inputs = to_inputs(random_tokens(seed, spread=1e-3))
    ours, before = (
        total_and_gradient(inputs, SEQUENCE_MEAN["gspo"].model_copy(update={"revision": revision}))
        for revision in (2, 1)
    )
    assert ours[0] == before[0]
    torch.testing.assert_close(ours[1], before[1], rtol=1e-12, atol=1e-16)


def test_penalties_of_a_masked_weight_stay_whole() -> None:
    """The correction masks the policy loss and the proximal penalty, not the KL to the reference and the entropy."""
    token = Token(-1.0, -1.0, -9.0, 1.0, True, 0, reference=-1.5, entropy=2.0)
    algorithm = ALL["masked_and_regularized"]
    total, gradient = total_and_gradient(to_inputs([token]), algorithm)
    assert total == pytest.approx(0.3 * (math.exp(-0.5) + 0.5 - 1.0) - 0.05 * 2.0)
    assert gradient.item() == pytest.approx(0.3 * (1.0 - math.exp(-0.5)))


def test_the_reference_kl_is_k3_before_the_coefficient_wherever_the_kl_is_placed() -> None:
    token = Token(-1.0, -1.0, -1.0, 1.0, True, 0, reference=-1.5)
    for algorithm in ALL.values():
        _, metrics = make_loss(algorithm)(to_inputs([token]))
        assert metrics["reference_kl"].item() == pytest.approx(math.exp(-0.5) + 0.5 - 1.0)
        _, metrics = make_loss(algorithm)(replace(to_inputs([token]), reference_logprobs=None))
        assert "reference_kl" not in metrics


def test_the_coefficient_of_the_step_wins_over_the_one_where_it_began() -> None:
    token = Token(-1.0, -1.0, -1.0, 0.0, True, 0, reference=-1.5)
    loss = make_loss(ALL["reference_k2"])
    losses = [loss(replace(to_inputs([token]), kl_coefficient=beta))[0].item() for beta in (0.0, 1.0, 2.0)]
    assert losses == pytest.approx([0.0, 0.125, 0.25])


@pytest.mark.parametrize("estimator", KlEstimator)
def test_a_token_that_the_reference_finds_impossible_is_pulled_back_with_a_gradient(estimator: KlEstimator) -> None:
    token = Token(-0.1, -0.1, -0.1, 0.0, True, 0, reference=-100.0)
    _, gradient = total_and_gradient(to_inputs([token]), AlgorithmSpec(**REFERENCE, kl_estimator=estimator))
    assert gradient.item() >= 0.3


def test_missing_inputs_are_named() -> None:
    inputs = replace(to_inputs(random_tokens(1)), reference_logprobs=None, importance_kept=None, kl_coefficient=0.1)
    with pytest.raises(ValueError, match="reference_logprobs"):
        make_loss(AlgorithmSpec(kl_coefficient=0.1))(inputs)
    with pytest.raises(ValueError, match="importance_kept"):
        make_loss(ALL["m2po"])(inputs)


def test_the_surrogate_has_the_whole_gradient_on_both_sides_of_every_clip() -> None:
    for ratio, advantage in ((1e6, 1.0), (1e-6, -1.0), (1e6, -1.0), (1e-6, 1.0)):
        assert gradient_at(ratio, advantage, AlgorithmSpec(**SURROGATE)) == pytest.approx(-ratio * advantage)


def test_m2po_counts_the_tokens_that_it_left_out_by_the_sign_of_the_advantage() -> None:
    tokens = [Token(-1.0, -1.0, -2.0, sign, True, 0, kept=kept) for sign in (1.0, -1.0) for kept in (True, False)]
    _, metrics = make_loss(ALL["m2po"])(to_inputs(tokens))
    assert metrics["mask_fraction_positive"].tolist() == [0, 1, 0, 0]
    assert metrics["mask_fraction_negative"].tolist() == [0, 0, 0, 1]
    torch.testing.assert_close(metrics["importance_weight"].tolist(), [math.e, 0.0, math.e, 0.0])
