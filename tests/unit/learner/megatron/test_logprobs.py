"""Log-probs and entropies against torch.distributions in float64."""

from __future__ import annotations

import pytest
import torch

from services.learner.megatron.logprobs import token_logprobs


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_values_and_gradients_are_those_of_a_categorical_distribution(temperature: float) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(40, 37, dtype=torch.float64) * 8).requires_grad_()
    targets = torch.randint(37, (40,))
    weights = torch.randn(40, dtype=torch.float64)
    logprobs, entropy = token_logprobs(logits, targets, temperature=temperature)
    (logprobs * weights).sum().backward()  # type: ignore[no-untyped-call]
    got = logits.grad
    logits.grad = None
    distribution = torch.distributions.Categorical(logits=logits / temperature)
    expected = distribution.log_prob(targets)  # type: ignore[no-untyped-call]
    (expected * weights).sum().backward()
    torch.testing.assert_close(logprobs, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy, distribution.entropy(), rtol=1e-10, atol=1e-12)  # type: ignore[no-untyped-call]
    torch.testing.assert_close(got, logits.grad, rtol=1e-10, atol=1e-13)
    assert not entropy.requires_grad


def test_the_gradient_is_that_of_finite_differences() -> None:
    logits = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 4, 2])
    assert torch.autograd.gradcheck(lambda x: token_logprobs(x, targets, temperature=0.7)[0], (logits,))


def test_large_logits_do_not_overflow_and_inputs_stay_as_they_are() -> None:
    logits = torch.tensor([[5000.0, -5000.0, 4999.0]])
    before = logits.clone()
    logprobs, entropy = token_logprobs(logits, torch.tensor([2]))
    assert logprobs.item() == pytest.approx(-1.3132616, rel=1e-6)
    assert entropy.item() == pytest.approx(0.5822031, rel=1e-6)
    assert torch.equal(logits, before)


def test_bfloat16_logits_are_summed_in_float32() -> None:
    logits = torch.randn(8, 4096).bfloat16()
    targets = torch.randint(4096, (8,))
    logprobs, _ = token_logprobs(logits, targets)
    expected = torch.log_softmax(logits.double(), -1).gather(-1, targets[:, None])[:, 0]
    assert logprobs.dtype is torch.float32
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-6, atol=1e-6)


def test_an_impossible_token_adds_nothing_to_the_entropy() -> None:
    logits = torch.tensor([[1.0, -torch.inf, 3.0, 0.5], [0.1, 0.2, 0.3, 0.4]], dtype=torch.float64, requires_grad=True)
    logprobs, entropy = token_logprobs(logits, torch.tensor([2, 1]))
    possible = torch.distributions.Categorical(logits=torch.tensor([1.0, 3.0, 0.5], dtype=torch.float64))
    assert entropy[0].item() == pytest.approx(possible.entropy().item(), rel=1e-12)  # type: ignore[no-untyped-call]
    logprobs.sum().backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert token_logprobs(logits, torch.tensor([1, 1]))[0][0] == -torch.inf
    assert token_logprobs(torch.tensor([[0.0, torch.nan]]), torch.tensor([0]))[1].isnan().all()
