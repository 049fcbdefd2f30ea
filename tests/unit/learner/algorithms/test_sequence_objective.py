"""GSPO token by token is the paper's sequence objective: J = (1/N) Σ_i min(s_i A_i, clip(s_i) A_i), s_i = (π(y_i)/π_old(y_i))^(1/|y_i|)."""

from __future__ import annotations

import pytest
import torch

from services.common.spec.algorithm import AlgorithmSpec
from services.common.spec.choices import LossName
from services.learner.algorithms.losses import LossInputs, make_loss

LENGTHS = (5, 1, 8, 3)
ADVANTAGES = (1.5, -0.5, 1.0, -1.0)
ALGORITHM = AlgorithmSpec(loss=LossName.GSPO, token_level_loss=False, clip_ratio_low=3e-4, clip_ratio_high=4e-4)


def a_batch(seed: int, spread: float) -> tuple[LossInputs, list[torch.Tensor]]:
    """Sequences side by side with a masked token of garbage in each, and those of their unmasked tokens' places."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([length + 1 for length in LENGTHS])
    ids = torch.repeat_interleave(torch.arange(len(LENGTHS)), lengths)
    starts = torch.cumsum(lengths, 0) - lengths
    mask = torch.ones(len(ids), dtype=torch.bool)
    mask[starts + lengths // 2] = False
    old = -torch.rand(len(ids), generator=generator, dtype=torch.float64)
    trainer = old + spread * torch.randn(len(ids), generator=generator, dtype=torch.float64)
    trainer[~mask] = torch.nan
    inputs = LossInputs(
        trainer_logprobs=trainer.requires_grad_(), old_logprobs=old, inference_logprobs=old,
        advantages=torch.tensor(ADVANTAGES, dtype=torch.float64)[ids], loss_mask=mask, sequence_ids=ids,
        global_tokens=sum(LENGTHS), global_sequences=len(LENGTHS), entropy=torch.zeros(len(ids)),
    )  # fmt: skip
    return inputs, [torch.nonzero(mask & (ids == i))[:, 0] for i in range(len(LENGTHS))]


def sequence_loss(inputs: LossInputs, places: torch.Tensor, advantage: float) -> torch.Tensor:
    """−min(s A, clip(s) A) of one sequence, as the paper writes it."""
    s = (inputs.trainer_logprobs[places].sum() - inputs.old_logprobs[places].sum()).div(len(places)).exp()
    return -torch.minimum(s * advantage, s.clamp(1 - 3e-4, 1 + 4e-4) * advantage)


@pytest.mark.parametrize("spread", [1e-5, 1e-3, 0.5])
@pytest.mark.parametrize("seed", range(4))
def test_the_batch_loss_and_its_gradient_are_those_of_the_sequence_objective(seed: int, spread: float) -> None:
    inputs, sequences = a_batch(seed, spread)
    objective = torch.stack([sequence_loss(inputs, p, a) for p, a in zip(sequences, ADVANTAGES, strict=True)]).mean()
    total = make_loss(ALGORITHM)(inputs)[0].sum() / inputs.global_tokens
    torch.testing.assert_close(total, objective, rtol=1e-12, atol=1e-15)
    (ours,) = torch.autograd.grad(total, inputs.trainer_logprobs)
    (papers,) = torch.autograd.grad(objective, inputs.trainer_logprobs)
    torch.testing.assert_close(ours, torch.where(inputs.loss_mask, papers, 0.0), rtol=1e-12, atol=1e-18)


@pytest.mark.parametrize("place", range(len(LENGTHS)))
def test_the_tokens_of_a_sequence_sum_to_its_length_times_its_objective(place: int) -> None:
    inputs, sequences = a_batch(9, 1e-5)
    share = inputs.global_tokens / inputs.global_sequences / LENGTHS[place]
    summed = make_loss(ALGORITHM)(inputs)[0][sequences[place]].sum() / share
    objective = LENGTHS[place] * sequence_loss(inputs, sequences[place], ADVANTAGES[place])
    (ours,) = torch.autograd.grad(summed, inputs.trainer_logprobs, retain_graph=True)
    (papers,) = torch.autograd.grad(objective, inputs.trainer_logprobs)
    torch.testing.assert_close(ours, torch.where(inputs.loss_mask, papers, 0.0), rtol=1e-12, atol=1e-18)
    assert ours.abs().max() > 0.0


@pytest.mark.parametrize("places", [(0, 2), (1, 3)])
def test_a_sequence_that_went_far_enough_gets_no_gradient_at_any_token(places: tuple[int, ...]) -> None:
    """Sequences 0 and 2 have A > 0 and became likelier; 1 and 3 have A < 0 and became rarer."""
    inputs, sequences = a_batch(1, 0.0)
    shift = torch.zeros_like(inputs.old_logprobs)
    for place in places:
        shift[sequences[place]] = 5e-4 if ADVANTAGES[place] > 0 else -4e-4
    trainer = (inputs.trainer_logprobs.detach() + shift).requires_grad_()
    moved = LossInputs(
        trainer, inputs.old_logprobs, inputs.inference_logprobs, inputs.advantages, inputs.loss_mask, inputs.sequence_ids,
        inputs.global_tokens, inputs.global_sequences, inputs.entropy,
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(make_loss(ALGORITHM)(moved)[0].sum(), trainer)
    for place, tokens in enumerate(sequences):
        assert bool((gradient[tokens] == 0.0).all()) is (place in places)
