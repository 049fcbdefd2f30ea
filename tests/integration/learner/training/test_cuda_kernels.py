"""CUDA's own kernels, on a GPU, against float64: attention of shared prompts, log-probs and entropies; and that they repeat their bits."""

from __future__ import annotations

import pytest
import torch

from services.common.config.settings import Platform
from services.learner.training.logprobs import token_logprobs
from services.learner.training.platform import prepare
from services.learner.training.prompt_sharing import Segment, encode_segments, shared_attention
from tests.integration.learner.platforms import PLATFORM
from tests.unit.learner.training.test_prompt_sharing import inputs, leaves, naive, segments_of

pytestmark = pytest.mark.skipif(PLATFORM is not Platform.CUDA, reason="MILLRACE_TEST_PLATFORM=cuda runs these on a GPU")
ROWS = {
    "groups": segments_of([(70, [40, 3, 65]), (1, [1]), (30, []), (300, [200, 1, 130, 257])]),
    "joined": segments_of([(70, []), (1, []), (129, [])]),
    "one": segments_of([(33, [500])]),
}


@pytest.fixture(autouse=True)
def prepared() -> None:
    prepare(PLATFORM)


def relative(found: torch.Tensor | None, expected: torch.Tensor | None) -> float:
    assert found is not None
    assert expected is not None
    return float((found.detach().double().cpu() - expected.detach()).norm() / expected.detach().norm())


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
def test_attention_of_shared_prompts_and_its_gradients(row: str, dtype: torch.dtype, bound: float) -> None:
    segments = ROWS[row]
    given, gradient = inputs(segments, dtype)
    others = leaves(given, torch.float64)
    expected = naive(*others, segments, 16**-0.5)
    expected.backward(gradient.double())  # type: ignore[no-untyped-call]
    runs = []
    for _ in range(3):
        query, key, value = (tensor.cuda().requires_grad_() for tensor in given)
        found = shared_attention(query, key, value, encode_segments(segments), None)
        found.backward(gradient.cuda())  # type: ignore[no-untyped-call]
        runs.append([found.detach(), query.grad, key.grad, value.grad])
    for a, b in zip(runs[0], [expected, *(leaf.grad for leaf in others)], strict=True):
        assert relative(a, b) < bound
    assert all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(runs[0], runs[2], strict=True))


def test_a_rows_memory_grows_with_its_length_and_not_with_its_square() -> None:
    peaks = []
    for length in (8192, 32_768):
        segments = [Segment(length // 4, is_prompt=True), *[Segment(length // 4, is_prompt=False)] * 3]
        rows = [torch.randn(length, n, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in (14, 2, 2)]
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        shared_attention(rows[0], rows[1], rows[2], encode_segments(segments), None).sum().backward()  # type: ignore[no-untyped-call]
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 4.2 * peaks[0]


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("width", [128, 151_936])
def test_logprobs_entropies_and_their_gradients(
    width: int, dtype: torch.dtype, bound: float, entropy_gradient: bool
) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(40, width) * 4).to(dtype)
    logits[3, 5] = -torch.inf
    targets, weights = torch.randint(6, width, (40,)), torch.randn(2, 40)
    exact = logits.double().requires_grad_()
    expected = token_logprobs(exact, targets, temperature=0.8, entropy_gradient=entropy_gradient)
    mine = logits.cuda().requires_grad_()
    found = token_logprobs(mine, targets.cuda(), temperature=0.8, entropy_gradient=entropy_gradient)
    for values in zip(found, expected, strict=True):
        assert relative(*values) < 2e-6
    for (logprobs, entropies), w in ((found, weights.cuda()), (expected, weights)):
        total = (logprobs * w[0]).sum() + ((entropies * w[1]).sum() if entropy_gradient else 0.0)
        total.backward()  # type: ignore[no-untyped-call]
    assert relative(mine.grad, exact.grad) < bound
