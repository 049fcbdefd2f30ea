"""Shared prompts: attention and its gradients against a naive one with a mask, in float64 and as the ranks compute it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.learner.training.prompt_sharing import Segment, by_piece, encode_segments, pieces_of, shared_attention

GROUPS = st.lists(st.tuples(st.integers(1, 20), st.lists(st.integers(1, 20), max_size=4)), min_size=1, max_size=4)
Groups = list[tuple[int, list[int]]]
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def segments_of(groups: Groups) -> list[Segment]:
    return [
        segment
        for prompt, responses in groups
        for segment in (Segment(prompt, True), *(Segment(n, False) for n in responses))
    ]


def naive(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: list[Segment], scale: float
) -> torch.Tensor:
    """One softmax over a mask of the row's square, written position by position."""
    owner: list[int] = []
    prompt: list[int] = []
    for i, segment in enumerate(segments):
        newest = i if segment.is_prompt else prompt[-1]
        owner += [i] * segment.length
        prompt += [newest] * segment.length
    seen = torch.tensor(
        [[k <= q and owner[k] in (owner[q], prompt[q]) for k in range(len(owner))] for q in range(len(owner))]
    )
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value)


def inputs(segments: list[Segment], dtype: torch.dtype) -> tuple[Inputs, torch.Tensor]:
    """Query, key and value of 4 heads over 2; and a gradient of the output."""
    torch.manual_seed(0)
    length = sum(segment.length for segment in segments)
    query, key, value, gradient = (2 * torch.randn(length, heads, 16, dtype=dtype) for heads in (4, 2, 2, 4))
    return (query, key, value), gradient


def leaves(tensors: Inputs, dtype: torch.dtype | None = None, factor: float = 1.0) -> Inputs:
    """Copies that collect gradients."""
    query, key, value = ((factor * tensor).detach().to(dtype or tensor.dtype).requires_grad_() for tensor in tensors)
    return query, key, value


def assert_same(
    found: torch.Tensor, expected: torch.Tensor, gradient: torch.Tensor, mine: Inputs, others: Inputs
) -> None:
    """Both outputs, and with this gradient of theirs those of the leaves that they are made of, are the same but for rounding."""
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    found.backward(gradient)  # type: ignore[no-untyped-call]
    expected.backward(gradient)  # type: ignore[no-untyped-call]
    for a, b in zip(mine, others, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("by_segment", [False, True])
@given(GROUPS)
def test_a_response_attends_to_its_prompt_and_to_itself_alone(by_segment: bool, groups: Groups) -> None:
    segments = segments_of(groups)
    given_inputs, gradient = inputs(segments, torch.float64)
    mine, others = leaves(given_inputs), leaves(given_inputs)
    encoded = encode_segments(segments)
    pieces = pieces_of(encoded.numpy().tobytes())
    found = by_piece(*mine, pieces, 0.3) if by_segment else shared_attention(*mine, encoded, 0.3)
    expected = naive(*others, segments, 0.3)
    assert_same(found, expected, gradient, mine, others)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_it_rounds_as_one_kernel_would(dtype: torch.dtype, bound: float) -> None:
    segments = segments_of([(70, [40, 3, 65]), (1, [1]), (30, [])])
    given_inputs, gradient = inputs(segments, dtype)
    mine, others = leaves(given_inputs), leaves(given_inputs, torch.float64)
    found, expected = shared_attention(*mine, encode_segments(segments), None), naive(*others, segments, 16**-0.5)
    assert found.dtype is dtype
    found.backward(gradient)  # type: ignore[no-untyped-call]
    expected.backward(gradient.double())  # type: ignore[no-untyped-call]
    for a, b in [(found, expected), *((a.grad, b.grad) for a, b in zip(mine, others, strict=True))]:
        assert a is not None
        assert b is not None
        assert float((a.detach().double() - b.detach()).norm() / b.detach().norm()) < bound


def test_large_scores_leave_padding_without_weight() -> None:
    """A padded place borrows another position's scores: they must not overflow into the sums."""
    segments = segments_of([(9, [2, 7]), (3, [1, 5, 4])])
    given_inputs, gradient = inputs(segments, torch.float32)
    mine = leaves(given_inputs, factor=30)
    found = shared_attention(*mine, encode_segments(segments), 1.0)
    found.backward(gradient)  # type: ignore[no-untyped-call]
    assert all(bool(tensor.isfinite().all()) for tensor in (found, *(a.grad for a in mine if a.grad is not None)))
