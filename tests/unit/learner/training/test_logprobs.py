"""Log-probs and entropies against torch.distributions in float64."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from services.learner.training.logprobs import token_logprobs


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


def plain(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies that autograd differentiates itself."""
    logs = (logits / temperature).log_softmax(-1)
    return logs.gather(-1, targets[:, None])[:, 0], -(logs.exp() * logs).sum(-1)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("scale", [0.01, 1.0, 8.0])
def test_the_entropy_has_the_gradient_of_a_plain_softmax(temperature: float, scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(40, 37, generator=generator, dtype=torch.float64) * scale).requires_grad_()
    targets = torch.randint(37, (40,), generator=generator)
    weights, entropy_weights = torch.randn(2, 40, generator=generator, dtype=torch.float64)
    gradients = []
    for logprobs, entropy in (
        token_logprobs(logits, targets, temperature=temperature, entropy_gradient=True),
        plain(logits, targets, temperature),
    ):
        gradients.append(
            [
                torch.autograd.grad((entropy * entropy_weights).sum(), logits, retain_graph=True)[0],
                torch.autograd.grad((logprobs * weights).sum(), logits, retain_graph=True)[0],
                torch.autograd.grad((logprobs * weights + entropy * entropy_weights).sum(), logits)[0],
            ]
        )
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-9, atol=1e-12)


def test_the_gradient_of_the_entropy_is_that_of_finite_differences() -> None:
    logits = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 4, 2])
    assert torch.autograd.gradcheck(
        lambda x: token_logprobs(x, targets, temperature=0.7, entropy_gradient=True), (logits,)
    )


def test_values_and_the_logprobs_gradient_have_the_same_bits_with_and_without_the_entropys() -> None:
    logits = (torch.randn(20, 300) * 5).requires_grad_()
    targets = torch.randint(300, (20,))
    found = []
    for entropy_gradient in (False, True):
        logprobs, entropy = token_logprobs(logits, targets, temperature=0.8, entropy_gradient=entropy_gradient)
        assert entropy.requires_grad is entropy_gradient
        found.append((logprobs, entropy, torch.autograd.grad(logprobs.sum(), logits)[0]))
    for without, together in zip(*found, strict=True):
        assert torch.equal(without, together)


def test_an_impossible_token_has_no_gradient_of_the_entropy() -> None:
    logits = torch.tensor([[1.0, -torch.inf, 3.0, 0.5], [0.0, -torch.inf, -torch.inf, -torch.inf]], requires_grad=True)
    _, entropy = token_logprobs(logits, torch.tensor([2, 0]), entropy_gradient=True)
    (gradient,) = torch.autograd.grad(entropy.sum(), logits)
    possible = torch.tensor([1.0, 3.0, 0.5], requires_grad=True)
    (expected,) = torch.autograd.grad(plain(possible[None], torch.tensor([0]), 1.0)[1].sum(), possible)
    torch.testing.assert_close(gradient[0, [0, 2, 3]], expected, rtol=1e-5, atol=1e-7)
    assert gradient[0, 1] == 0.0
    assert gradient[1].tolist() == [0.0] * 4


def test_bfloat16_logits_get_a_bfloat16_gradient() -> None:
    logits = torch.randn(8, 512).bfloat16().requires_grad_()
    _, entropy = token_logprobs(logits, torch.randint(512, (8,)), entropy_gradient=True)
    (gradient,) = torch.autograd.grad(entropy.sum(), logits)
    exact = logits.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(plain(exact, torch.zeros(8, dtype=torch.int64), 1.0)[1].sum(), exact)
    assert gradient.dtype is torch.bfloat16
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-2, atol=1e-6)


RANKS = 2


def of_rank(rank: int, folder: str) -> None:
    """One rank's slice of the vocabulary."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    logits, targets, weights = a_batch()
    part = logits.chunk(RANKS, -1)[rank].clone().requires_grad_()
    logprobs, entropy = token_logprobs(part, targets, temperature=1.3, group=dist.group.WORLD, entropy_gradient=True)
    (gradient,) = torch.autograd.grad((logprobs * weights[0] + entropy * weights[1]).sum(), part)
    torch.save({"entropy": entropy.detach(), "gradient": gradient}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def a_batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(10, 12, generator=generator, dtype=torch.float64) * 3
    return logits, torch.randint(12, (10,), generator=generator), torch.randn(2, 10, generator=generator).double()


def test_ranks_that_split_the_vocabulary_have_the_entropy_and_gradient_of_the_whole(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    ranks = [spawn.Process(target=of_rank, args=(rank, str(tmp_path))) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
        assert process.exitcode == 0
    parts = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(RANKS)]
    logits, targets, weights = a_batch()
    logits.requires_grad_()
    logprobs, entropy = plain(logits, targets, 1.3)
    (expected,) = torch.autograd.grad((logprobs * weights[0] + entropy * weights[1]).sum(), logits)
    torch.testing.assert_close(torch.cat([part["gradient"] for part in parts], -1), expected, rtol=1e-9, atol=1e-12)
    for part in parts:
        torch.testing.assert_close(part["entropy"], entropy.detach(), rtol=1e-9, atol=1e-12)
