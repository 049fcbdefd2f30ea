"""Attention of rows in which responses share their prompt: a tree of depth one, computed without a mask of the row's square.

    row        prompt │ response │ response │ prompt │ response │ …          segments, one after the other, without padding
    positions  0 … P−1│ P …      │ P …      │ 0 …                            a response goes on where its prompt ends
    attention  a prompt: itself; a response: its prompt, and itself          causal

The segments travel through Megatron in the place of its attention mask, as a small tensor: it passes activation recomputation, which keeps
tensors only. On a CPU all prompts, all responses, and all responses towards their prompts are a call each, joined by the log-sum-exp of
their scores. On CUDA and NPUs all of it is a call of one kernel (`cuda_attention`, `npu_attention`). What remains, float32 on CUDA, is a
call of scaled_dot_product_attention for each segment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.autograd.function import once_differentiable
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from services.learner.training.cuda_attention import DTYPES as FLASH_DTYPES
from services.learner.training.cuda_attention import flash_attention
from services.learner.training.npu_attention import Piece, fused_attention

_Positions = npt.NDArray[np.int64]

_LAYOUTS = 256
"""Rows whose layout is kept: each layer of each micro-batch, and its recomputation, asks for it again."""


class Segment(NamedTuple):
    """Consecutive positions of a row: a prompt, or a response of the last prompt before it."""

    length: int
    is_prompt: bool


def encode_segments(segments: list[Segment]) -> torch.Tensor:
    """int64 [segments, 2], on the CPU: (length, whether it is a prompt)."""
    return torch.tensor(segments, dtype=torch.int64)


def shared_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """Attention within a row of segments.

    Args:
        query: [s, heads, head size].
        key: [s, key-value heads, head size].
        value: as `key`.
        segments: of `encode_segments`; their lengths add up to s.
        scale: of the scores; None is 1 / √head size.

    Returns:
        [s, heads, head size].
    """
    layout = _layout_of(segments.numpy().tobytes())
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if query.device.type == "npu":
        return fused_attention(query, key, value, layout.pieces, scale)
    if query.device.type != "cpu":
        return on_cuda(query, key, value, layout.pieces, scale)
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    context: torch.Tensor = _JoinedAttention.apply(query, key, value, layout, scale)  # type: ignore[no-untyped-call]
    return context


@dataclass(frozen=True, slots=True)
class _Layout:
    """A row's segments as indices for padded batches: P prompts of at most p positions, N responses of r, q of all a prompt's responses."""

    pieces: tuple[Piece, ...]
    """The segments in the order of the row."""
    prompts: _Padded
    responses: _Padded
    """Responses, each for itself."""
    followers: _Padded
    """Responses, all of a prompt as one: every one of its positions attends to every one of the prompt's."""
    beyond: torch.Tensor | None
    """float32 [P, 1, 1, p]: −inf where a prompt is over; None where all prompts have one length."""


@dataclass(frozen=True, slots=True)
class _Padded:
    """Parts of a row as a batch that is padded on the right."""

    shape: tuple[int, int]
    """Parts, and their width."""
    gather: torch.Tensor
    """int64 [parts · width], the row's position at each place; 0 at padding."""
    padding: torch.Tensor
    """int64, the places that are padding."""
    places: torch.Tensor
    """int64 [n], the places that are not."""
    positions: torch.Tensor
    """int64 [n], the row's positions at `places`."""

    def batch(self, row: torch.Tensor, padding: float | None = None) -> torch.Tensor:
        """[s, heads, …] → [parts, heads, width, …]; padding has that value, or with None any."""
        chosen = row.index_select(0, self.gather)
        if padding is not None:
            chosen.index_fill_(0, self.padding, padding)
        return chosen.view(*self.shape, *row.shape[1:]).transpose(1, 2)

    def unpad(self, batch: torch.Tensor) -> torch.Tensor:
        """[parts, heads, width, …] → [n, heads, …], in the order of `positions`."""
        return batch.transpose(1, 2).flatten(0, 1).index_select(0, self.places)


def _pad(parts: list[_Positions]) -> _Padded:
    width = max((len(part) for part in parts), default=0)
    gather = np.zeros((len(parts), width), np.int64)
    held = np.zeros((len(parts), width), bool)
    for i, part in enumerate(parts):
        gather[i, : len(part)], held[i, : len(part)] = part, True
    indices = gather.reshape(-1), np.flatnonzero(~held), np.flatnonzero(held), gather[held]
    return _Padded((len(parts), width), *(torch.from_numpy(array) for array in indices))


def pieces_of(encoded: bytes) -> tuple[Piece, ...]:
    """The segments of a row, from the bytes of `encode_segments`, each as a piece with all that its queries see."""
    pieces: list[Piece] = []
    prompt: tuple[tuple[int, int], ...] = ()
    start = 0
    for length, is_prompt in np.frombuffer(encoded, np.int64).reshape(-1, 2).tolist():
        own = (start, length)
        prompt = (own,) if is_prompt else prompt
        pieces.append(Piece(start, length, prompt if is_prompt else (*prompt, own)))
        start += length
    return tuple(pieces)


@lru_cache(maxsize=_LAYOUTS)
def _layout_of(encoded: bytes) -> _Layout:
    start = 0
    prompts: list[_Positions] = []
    responses: list[_Positions] = []
    followers: list[list[_Positions]] = []
    for length, is_prompt in np.frombuffer(encoded, np.int64).reshape(-1, 2).tolist():
        positions = np.arange(start, start + length)
        if is_prompt:
            prompts.append(positions)
            followers.append([])
        else:
            responses.append(positions)
            followers[-1].append(positions)
        start += length
    none = np.zeros(0, np.int64)
    answering = [np.concatenate([none, *mine]) for mine in followers]
    lengths = [len(prompt) for prompt in prompts]
    return _Layout(pieces_of(encoded), _pad(prompts), _pad(responses), _pad(answering), _beyond(lengths))


def _beyond(lengths: list[int]) -> torch.Tensor | None:
    if len(set(lengths)) == 1:
        return None
    places = torch.arange(max(lengths))
    over = places >= torch.tensor(lengths)[:, None]
    return torch.zeros(over.shape).masked_fill(over, -torch.inf)[:, None, None]


_Call = tuple[_Padded, _Padded, bool, torch.Tensor | None]
"""Queries, keys, whether causal, and what is added to the scores."""


def _calls(layout: _Layout, dtype: torch.dtype) -> Iterator[_Call]:
    yield layout.prompts, layout.prompts, True, None
    if layout.responses.shape[1]:
        yield layout.responses, layout.responses, True, None
        beyond = None if layout.beyond is None else layout.beyond.to(dtype)
        yield layout.followers, layout.prompts, False, beyond


class _JoinedAttention(torch.autograd.Function):
    """The three parts with torch's flash kernels for CPUs, which have the log-sum-exp of each query's scores.

    With the joined output and log-sum-exp, the kernel's gradient of one part is that part's share of the whole gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  torch's own type of it is private
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layout: _Layout,
        scale: float,
    ) -> torch.Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        output = torch.zeros_like(query, dtype=wide)
        total = query.new_full(query.shape[:2], -torch.inf, dtype=wide)
        for queries, keys, causal, bias in _calls(layout, query.dtype):
            part, logs = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # noqa: SLF001  SDPA gives no log-sum-exp
                queries.batch(query), keys.batch(key), keys.batch(value), 0.0, causal, attn_mask=bias, scale=scale
            )
            part, logs = queries.unpad(part), queries.unpad(logs)
            before = total.index_select(0, queries.positions)
            joined = torch.logaddexp(before, logs)
            kept = output.index_select(0, queries.positions) * (before - joined).exp_()[..., None]
            output.index_copy_(0, queries.positions, kept.add_(part * (logs - joined).exp_()[..., None]))
            total.index_copy_(0, queries.positions, joined)
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, total)
        ctx.layout, ctx.scale = layout, scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:  # noqa: ANN401
        query, key, value, output, total = ctx.saved_tensors
        found = [torch.zeros_like(tensor) for tensor in (query, key, value)]
        for queries, keys, causal, bias in _calls(ctx.layout, query.dtype):
            # Padded queries have a gradient of 0 and probabilities of 0: they add nothing.
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(  # noqa: SLF001
                queries.batch(grad, 0.0), queries.batch(query), keys.batch(key), keys.batch(value), queries.batch(output),
                queries.batch(total, torch.inf), 0.0, causal, attn_mask=bias, scale=ctx.scale,
            )  # fmt: skip
            for row, part, padded in zip(found, parts, (queries, keys, keys), strict=True):
                row.index_add_(0, padded.positions, padded.unpad(part))
        return found[0], found[1], found[2], None, None


def on_cuda(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pieces: tuple[Piece, ...], scale: float
) -> torch.Tensor:
    """Attention of the pieces' queries; `key` and `value` may have more positions than `query`."""
    attend = flash_attention if query.dtype in FLASH_DTYPES else by_piece
    return attend(query, key, value, pieces, scale)


def by_piece(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pieces: tuple[Piece, ...], scale: float
) -> torch.Tensor:
    """The same, piece by piece; `key` and `value` may have more positions than `query`."""

    def heads_first(row: torch.Tensor, *spans: tuple[int, int]) -> torch.Tensor:
        return torch.cat([row[start : start + length] for start, length in spans]).transpose(0, 1)[None]

    outputs = []
    for piece in pieces:
        context = scaled_dot_product_attention(
            heads_first(query, (piece.start, piece.length)), heads_first(key, *piece.keys), heads_first(value, *piece.keys),
            attn_mask=causal_lower_right(piece.length, piece.seen), scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip
        outputs.append(context[0].transpose(0, 1))
    return torch.cat(outputs)
