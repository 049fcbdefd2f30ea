"""NPU attention: the fused kernel's arguments describe the attention that the CPU computes.

The stand-in is the kernel's documented meaning in plain torch: sequences that end at `actual_seq_qlen` and `actual_seq_kvlen`, and in
sparse mode 3 a causal mask that is aligned at the lower right corner, which is given as one compressed triangle of 2048.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from services.learner.training import npu_attention
from services.learner.training.npu_attention import Piece, fused_attention
from services.learner.training.prompt_sharing import Segment, encode_segments, pieces_of, shared_attention
from tests.unit.learner.training.test_prompt_sharing import GROUPS, Groups, inputs, leaves, segments_of


def documented_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, head_num: int, input_layout: str, *,
    atten_mask: torch.Tensor, scale: float, actual_seq_qlen: list[int], actual_seq_kvlen: list[int], sparse_mode: int,
) -> tuple[Any, ...]:  # fmt: skip
    """`torch_npu.npu_fusion_attention` for what is used of it."""
    assert (input_layout, sparse_mode, head_num) == ("TND", 3, query.shape[1])
    assert (actual_seq_qlen[-1], actual_seq_kvlen[-1]) == (len(query), len(key))
    assert len(key) == len(value)
    assert len(actual_seq_qlen) == len(actual_seq_kvlen) <= 1024
    assert torch.equal(atten_mask, torch.ones(2048, 2048, dtype=torch.bool).triu(1))
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    outputs = []
    for q, k in zip(itertools.pairwise([0, *actual_seq_qlen]), itertools.pairwise([0, *actual_seq_kvlen]), strict=True):
        queries, keys, values = query[slice(*q)], key[slice(*k)], value[slice(*k)]
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * scale
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + len(keys) - len(queries))
        outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values))
    return torch.cat(outputs), None, None, None, 0, 0, 0


def places(segments: list[Segment]) -> tuple[Piece, ...]:
    return pieces_of(encode_segments(segments).numpy().tobytes())


@given(GROUPS)
@settings(max_examples=25)
def test_the_kernel_is_asked_for_what_the_cpu_computes(groups: Groups) -> None:
    segments = segments_of(groups)
    given_inputs, gradient = inputs(segments, torch.float64)
    mine, others = leaves(given_inputs), leaves(given_inputs)
    found = fused_attention(*mine, places(segments), 0.3, documented_kernel)
    expected = shared_attention(*others, encode_segments(segments), 0.3)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    found.backward(gradient)  # type: ignore[no-untyped-call]
    expected.backward(gradient)  # type: ignore[no-untyped-call]
    for a, b in zip(mine, others, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=1e-6)


def test_more_segments_than_one_call_takes_are_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    segments = segments_of([(3, [2, 1, 4]), (1, []), (2, [5])])
    (query, key, value), _ = inputs(segments, torch.float64)
    whole = fused_attention(query, key, value, places(segments), 0.3, documented_kernel)
    monkeypatch.setattr(npu_attention, "MOST_SEQUENCES", 2)
    npu_attention._calls.cache_clear()
    assert len(npu_attention._calls(places(segments), query.device)) == 4
    torch.testing.assert_close(fused_attention(query, key, value, places(segments), 0.3, documented_kernel), whole)
    npu_attention._calls.cache_clear()


def test_nothing_of_it_is_imported_on_a_cpu() -> None:
    assert "torch_npu" not in sys.modules
