"""Attention of context parallelism: a rank's own queries against the keys and values of the whole row, which are gathered first.

    own keys, values ─► all-gather ─► row ─► attention, piece by piece ─► own context
    their gradient   ◄─ reduce-scatter ◄─ row

A piece is a run of consecutive queries of one segment. On a CPU its own square, its segment before it, and its prompt are a call each,
joined by the log-sum-exp of their scores; on CUDA and NPUs all pieces are a call of one kernel. No mask of the row's square is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.parallel_state import get_context_parallel_group
from torch.autograd.function import once_differentiable

from services.learner.training.context_chunks import own_pieces, row_order
from services.learner.training.npu_attention import Piece, fused_attention
from services.learner.training.prompt_sharing import on_cuda


def context_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """Attention of this rank's positions, [n, heads, head size], in their order.

    Args:
        query: [n, heads, head size], of the rank's positions.
        key: [n, key-value heads, head size], of the same.
        value: as `key`.
        segments: of `encode_segments`, of the whole row.
        scale: of the scores; None is 1 / √head size.
    """
    group = get_context_parallel_group()
    pieces = own_pieces(segments.numpy().tobytes(), dist.get_world_size(group), dist.get_rank(group))
    row: torch.Tensor = _GatheredRow.apply(torch.stack([key, value]), group)  # type: ignore[no-untyped-call]
    return attend(query, row[0], row[1], pieces, query.shape[-1] ** -0.5 if scale is None else scale)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pieces: tuple[Piece, ...], scale: float
) -> torch.Tensor:
    """Attention of the pieces' queries; `key` and `value` are those of the whole row."""
    if query.device.type == "npu":
        return fused_attention(query, key, value, pieces, scale)
    if query.device.type != "cpu":
        return on_cuda(query, key, value, pieces, scale)
    context: torch.Tensor = _PieceAttention.apply(query, key, value, pieces, scale)  # type: ignore[no-untyped-call]
    return context


class _GatheredRow(torch.autograd.Function):
    """[2, n, …] of each rank → [2, n · CP, …] in the order of the row."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:  # noqa: ANN401  torch's own type of it is private
        ctx.group, ctx.size = group, dist.get_world_size(group)
        gathered = own.new_empty(ctx.size, *own.shape)
        dist.all_gather_into_tensor(gathered.flatten(0, 1), own.contiguous(), group=group)
        by_chunk = gathered.transpose(0, 1).reshape(2, 2 * ctx.size, -1, *own.shape[2:])
        return by_chunk[:, row_order(ctx.size)].flatten(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ANN401
        by_chunk = torch.empty_like(gradient).view(2, 2 * ctx.size, -1, *gradient.shape[2:])
        by_chunk[:, row_order(ctx.size)] = gradient.reshape(by_chunk.shape)
        by_rank = by_chunk.view(2, ctx.size, -1, *gradient.shape[2:]).transpose(0, 1).contiguous()
        own = torch.empty_like(by_rank[0])
        dist.reduce_scatter_tensor(own, by_rank.flatten(0, 1), group=ctx.group)
        return own, None


_Call = tuple[slice, slice, bool]
"""Queries, keys of the row, whether causal."""


def _calls(piece: Piece) -> Iterator[_Call]:
    start, length, (*before, (first, seen)) = piece
    queries, own = slice(start, start + length), first + seen - length
    yield queries, slice(own, own + length), True
    if seen > length:
        yield queries, slice(first, own), False
    for other, count in before:
        yield queries, slice(other, other + count), False


def _heads_first(row: torch.Tensor, part: slice) -> torch.Tensor:
    """[s, heads, …] → [1, heads, part, …]."""
    return row[part].transpose(0, 1)[None]


def _heads_last(batch: torch.Tensor) -> torch.Tensor:
    return batch[0].transpose(0, 1)


class _PieceAttention(torch.autograd.Function):
    """The calls with torch's flash kernels for CPUs, as `prompt_sharing` has them; heads are repeated for one call at a time."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pieces: tuple[Piece, ...],
        scale: float,
    ) -> torch.Tensor:
        wide, repeats = torch.promote_types(query.dtype, torch.float32), query.shape[1] // key.shape[1]
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        total = query.new_empty(query.shape[:2], dtype=wide)
        for piece in pieces:
            queries = slice(piece.start, piece.start + piece.length)
            for place, (_, keys, causal) in enumerate(_calls(piece)):
                part, logs = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # noqa: SLF001  SDPA gives no log-sum-exp
                    _heads_first(query, queries), _repeated(key, keys, repeats), _repeated(value, keys, repeats),
                    0.0, causal, scale=scale,
                )  # fmt: skip
                part, logs = _heads_last(part).to(wide), _heads_last(logs)
                if place == 0:
                    mine, total[queries] = part, logs
                    continue
                joined = torch.logaddexp(total[queries], logs)
                mine = mine * (total[queries] - joined).exp_()[..., None]
                mine.add_(part * (logs - joined).exp_()[..., None])
                total[queries] = joined
            output[queries] = mine
        ctx.save_for_backward(query, key, value, output, total)
        ctx.pieces, ctx.scale = pieces, scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:  # noqa: ANN401
        query, key, value, output, total = ctx.saved_tensors
        repeats = query.shape[1] // key.shape[1]
        found = [torch.zeros_like(tensor) for tensor in (query, key, value)]
        for queries, keys, causal in (call for piece in ctx.pieces for call in _calls(piece)):
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(  # noqa: SLF001
                _heads_first(grad, queries), _heads_first(query, queries), _repeated(key, keys, repeats),
                _repeated(value, keys, repeats), _heads_first(output, queries), _heads_first(total, queries), 0.0, causal,
                scale=ctx.scale,
            )  # fmt: skip
            of_query, of_key, of_value = (_heads_last(part) for part in parts)
            found[0][queries] += of_query
            found[1][keys] += of_key.reshape(len(of_key), -1, repeats, of_key.shape[-1]).sum(2)
            found[2][keys] += of_value.reshape(len(of_value), -1, repeats, of_value.shape[-1]).sum(2)
        return found[0], found[1], found[2], None, None


def _repeated(row: torch.Tensor, part: slice, repeats: int) -> torch.Tensor:
    return _heads_first(row, part).repeat_interleave(repeats, 1)
