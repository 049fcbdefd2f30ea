"""CUDA attention of rows in which responses share their prompt: one call of torch's flash kernel for sequences of many lengths.

    queries   prompt │ response │ response │ …                              the row as it is
    keys      prompt │ prompt + response │ prompt + response │ …            causal, aligned at the end of each

The keys are copied for the call, forward and backward, and kept once; the gradients of the copies are summed in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from services.learner.training.npu_attention import Piece, key_positions

DTYPES = {torch.bfloat16, torch.float16}
"""What the kernel computes in."""
_ROWS = 64
"""Rows whose indices are kept on the device: each layer of a micro-batch, and its recomputation, asks for them again."""


def flash_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pieces: tuple[Piece, ...], scale: float
) -> torch.Tensor:
    """Attention of the pieces' queries, [n, heads, head size], as `query`; `key` and `value` are [s, key-value heads, head size]."""
    call = _call_of(pieces, query.device)
    context: torch.Tensor = _FlashAttention.apply(query, key, value, call, scale)  # type: ignore[no-untyped-call]
    return context


class Call(NamedTuple):
    """What the kernel is told of the pieces."""

    keys: torch.Tensor
    """Of `key_positions`."""
    query_ends: torch.Tensor
    """int32, 0, then where each piece ends among the queries."""
    key_ends: torch.Tensor
    """int32, 0, then where its keys end."""
    most_queries: int
    """Of one piece."""
    most_keys: int


@lru_cache(maxsize=_ROWS)
def _call_of(pieces: tuple[Piece, ...], device: torch.device) -> Call:
    queries, seen = [piece.length for piece in pieces], [piece.seen for piece in pieces]
    ends = [torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device) for lengths in (queries, seen)]
    return Call(key_positions(pieces).to(device), ends[0], ends[1], max(queries), max(seen))


def forward_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each piece, and the log-sum-exp of its scores, float32 [heads, n]."""
    output, logs, *_ = torch.ops.aten._flash_attention_forward(  # noqa: SLF001  SDPA takes no lengths
        query, key, value, call.query_ends, call.key_ends, call.most_queries, call.most_keys, 0.0, is_causal=True,
        return_debug_mask=False, scale=scale,
    )  # fmt: skip
    return output, logs


def backward_kernel(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor, logs: torch.Tensor,
    call: Call, scale: float,
) -> Sequence[torch.Tensor]:  # fmt: skip
    """Gradients of query, key and value."""
    none = torch.zeros(2, dtype=torch.uint64, device=query.device)  # random state: there is no dropout
    found: Sequence[torch.Tensor] = torch.ops.aten._flash_attention_backward(  # noqa: SLF001
        gradient, query, key, value, output, logs, call.query_ends, call.key_ends, call.most_queries, call.most_keys, 0.0, True, none,
        none.new_empty(0), scale=scale,
    )  # fmt: skip
    return found


class _FlashAttention(torch.autograd.Function):
    """The call; between forward and backward it keeps nothing that is longer than the row."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  torch's own type of it is private
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        call: Call,
        scale: float,
    ) -> torch.Tensor:
        query = query.contiguous()
        output, logs = forward_kernel(
            query, key.index_select(0, call.keys), value.index_select(0, call.keys), call, scale
        )
        ctx.save_for_backward(query, key, value, output, logs)
        ctx.call, ctx.scale = call, scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:  # noqa: ANN401
        query, key, value, output, logs = ctx.saved_tensors
        keys = ctx.call.keys
        copies = key.index_select(0, keys), value.index_select(0, keys)
        of_query, *of_copies = backward_kernel(gradient.contiguous(), query, *copies, output, logs, ctx.call, ctx.scale)
        sums = torch.zeros(2, *key.shape, dtype=torch.promote_types(key.dtype, torch.float32), device=key.device)
        sums.index_add_(1, keys, torch.stack(of_copies).to(sums.dtype))
        of_key, of_value = sums.to(key.dtype)
        return of_query, of_key, of_value, None, None
