"""CUDA attention: its kernel is asked for what the CPU computes, and the gradients of copied keys are summed.

The stand-ins mean what torch's flash kernel does for sequences of many lengths: a causal mask that is aligned at the end of each.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from services.learner.training import cuda_attention
from services.learner.training.cuda_attention import Call, flash_attention
from services.learner.training.prompt_sharing import encode_segments, pieces_of
from tests.unit.learner.training.test_npu_attention import documented_kernel
from tests.unit.learner.training.test_prompt_sharing import (
    GROUPS,
    Groups,
    assert_same,
    inputs,
    leaves,
    naive,
    segments_of,
)


def forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    (first, *query_ends), (first_key, *key_ends) = call.query_ends.tolist(), call.key_ends.tolist()
    assert (first, first_key) == (0, 0)
    lengths = [max(b - a for a, b in itertools.pairwise([0, *ends])) for ends in (query_ends, key_ends)]
    assert lengths == [call.most_queries, call.most_keys]
    mask = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
    output, *_ = documented_kernel(
        query, key, value, query.shape[1], "TND", atten_mask=mask, scale=scale, actual_seq_qlen=query_ends,
        actual_seq_kvlen=key_ends, sparse_mode=3,
    )  # fmt: skip
    return output, torch.zeros(0)


def backward(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: torch.Tensor, __: torch.Tensor, call: Call,
    scale: float,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    rows = leaves((query, key, value))
    with torch.enable_grad():
        return torch.autograd.grad(forward(*rows, call, scale)[0], rows, gradient)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_attention, "forward_kernel", forward)
    monkeypatch.setattr(cuda_attention, "backward_kernel", backward)


@pytest.mark.usefixtures("stand_ins")
@given(GROUPS)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_kernel_is_asked_for_the_attention_of_the_row(groups: Groups) -> None:
    segments = segments_of(groups)
    given_inputs, gradient = inputs(segments, torch.float64)
    mine, others = leaves(given_inputs), leaves(given_inputs)
    found = flash_attention(*mine, pieces_of(encode_segments(segments).numpy().tobytes()), 0.3)
    expected = naive(*others, segments, 0.3)
    assert_same(found, expected, gradient, mine, others)
