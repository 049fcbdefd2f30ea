"""NPU attention of rows in which responses share their prompt: one call of CANN's fused kernel for sequences of many lengths.

    queries   prompt │ response │ response │ …                              the row as it is
    keys      prompt │ prompt + response │ prompt + response │ …            causal, aligned at the end of each

It was not run on an NPU: names and meaning of the arguments are those of `torch_npu.npu_fusion_attention` in release 26.1.0.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

MOST_SEQUENCES = 1024
"""The kernel's limit of one call."""
CAUSAL_FROM_THE_END = 3
"""Its `sparse_mode` in which the last query of a sequence sees the last key."""
MASK_SIDE = 2048
"""The mask that it wants in this mode has this size, whatever the lengths."""

Kernel = Callable[..., tuple[Any, ...]]


class Piece(NamedTuple):
    """Consecutive queries of one segment, and the keys that they see: causal, aligned at the end."""

    start: int
    """Of the queries, among those that are given."""
    length: int
    """Of the queries."""
    keys: tuple[tuple[int, int], ...]
    """Start and length of each run of keys in the row: of a response its prompt; then the segment, up to the last query."""

    @property
    def seen(self) -> int:
        """How many keys."""
        return sum(length for _, length in self.keys)


def key_positions(pieces: Sequence[Piece]) -> torch.Tensor:
    """int64, the row's position at each place of the pieces' keys: before each response come its prompt's."""
    return torch.cat([torch.arange(start, start + length) for piece in pieces for start, length in piece.keys])


def fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pieces: tuple[Piece, ...],
    scale: float,
    kernel: Kernel | None = None,
) -> torch.Tensor:
    """Attention of the pieces' queries, [n, heads, head size], as `query`; `key` and `value` are [s, key-value heads, head size]."""
    kernel = kernel or importlib.import_module("torch_npu").npu_fusion_attention
    outputs = [
        kernel(
            query[call.queries].contiguous(),
            key.index_select(0, call.keys),
            value.index_select(0, call.keys),
            head_num=query.shape[1],
            input_layout="TND",
            atten_mask=_mask(query.device),
            scale=scale,
            actual_seq_qlen=call.query_ends,
            actual_seq_kvlen=call.key_ends,
            sparse_mode=CAUSAL_FROM_THE_END,
        )[0]
        for call in _calls(pieces, query.device)
    ]
    return torch.cat(outputs)


class _Call(NamedTuple):
    """Consecutive pieces."""

    queries: slice
    """Their positions."""
    keys: torch.Tensor
    """Of `key_positions`."""
    query_ends: list[int]
    """Where each piece ends among the queries."""
    key_ends: list[int]
    """Where its keys end."""


@lru_cache(maxsize=256)
def _calls(pieces: tuple[Piece, ...], device: torch.device) -> list[_Call]:
    return list(_split(pieces, device))


def _split(pieces: tuple[Piece, ...], device: torch.device) -> Iterator[_Call]:
    for first in range(0, len(pieces), MOST_SEQUENCES):
        some = pieces[first : first + MOST_SEQUENCES]
        query_ends = torch.tensor([piece.length for piece in some]).cumsum(0).tolist()
        key_ends = torch.tensor([piece.seen for piece in some]).cumsum(0).tolist()
        queries = slice(some[0].start, some[0].start + query_ends[-1])
        yield _Call(queries, key_positions(some).to(device), query_ends, key_ends)


@lru_cache(maxsize=1)
def _mask(device: torch.device) -> torch.Tensor:
    """bool, True above the diagonal: what is not attended to."""
    return torch.ones(MASK_SIDE, MASK_SIDE, dtype=torch.bool, device=device).triu(1)
