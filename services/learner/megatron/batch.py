"""Batches as tensors:  Sequence (one rollout)  ─► Row (one or more of them)  ─► MicroBatch (tensors)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from services.learner.groups.sequence import Sequence

Row = tuple[int, ...]
"""Indices of the sequences that share a row, in their order within it."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows padded on the right to one length, and their response tokens, one after the other: R over all rows.

    A micro-batch without sequences still runs, for pipeline and data parallelism need equal counts: one token, whose mask is False.
    """

    tokens: torch.Tensor
    """int64 [b, s]."""
    segment_ids: torch.Tensor | None
    """int64 [b, s], which sequence of the row a position belongs to; −1 is padding. None where each row holds one sequence."""
    positions: torch.Tensor
    """int64 [R], where in the [s, b] flattened hidden states the token is predicted: position · b + row."""
    targets: torch.Tensor
    """int64 [R], the response tokens."""
    inference_logprobs: torch.Tensor
    """float32 [R]."""
    advantages: torch.Tensor
    """float32 [R]."""
    loss_mask: torch.Tensor
    """bool [R]."""
    sequence_ids: torch.Tensor
    """int64 [R], ordinal of the token's sequence within this micro-batch, never falling."""
    offsets: torch.Tensor
    """int64 [R], the token's place among the response tokens of the whole global batch; −1 for the stand-in of an empty micro-batch."""


def collate(sequences: list[Sequence], rows: list[Row], offsets: list[int], device: torch.device) -> MicroBatch:
    """Lays the rows out.

    Args:
        sequences: the global batch.
        rows: the rows of this micro-batch.
        offsets: of each sequence of the global batch, the place of its first response token among all of them.
        device: where the tensors go.
    """
    if not rows:
        return _empty(device)
    packed = any(len(row) > 1 for row in rows)
    length = max(sum(sequences[i].row_len for i in row) for row in rows)
    tokens = np.zeros((len(rows), length), np.int64)
    segments = np.full((len(rows), length), -1, np.int64)
    positions = []
    for r, row in enumerate(rows):
        start = 0
        for k, i in enumerate(row):
            s = sequences[i]
            tokens[r, start : start + s.row_len] = s.tokens[:-1]
            segments[r, start : start + s.row_len] = k
            positions.append((start + s.prompt_len - 1 + np.arange(s.response_len)) * len(rows) + r)
            start += s.row_len
    order = [i for row in rows for i in row]
    responses = [sequences[i] for i in order]
    counts = [s.response_len for s in responses]
    return MicroBatch(
        tokens=torch.from_numpy(tokens).to(device),
        segment_ids=torch.from_numpy(segments).to(device) if packed else None,
        positions=_joined(positions, np.int64, device),
        targets=_joined([s.tokens[s.prompt_len :] for s in responses], np.int64, device),
        inference_logprobs=_joined([s.inference_logprobs for s in responses], np.float32, device),
        advantages=_joined([s.advantage for s in responses], np.float32, device),
        loss_mask=_joined([s.loss_mask for s in responses], np.bool_, device),
        sequence_ids=torch.from_numpy(np.repeat(np.arange(len(order), dtype=np.int64), counts)).to(device),
        offsets=_joined([offsets[i] + np.arange(n) for i, n in zip(order, counts, strict=True)], np.int64, device),
    )


def response_offsets(sequences: list[Sequence]) -> list[int]:
    """Of each sequence, the place of its first response token among all response tokens of the batch; and at the end their number."""
    return [0, *np.cumsum([s.response_len for s in sequences], dtype=np.int64).tolist()]


def _empty(device: torch.device) -> MicroBatch:
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    none = torch.zeros(1, dtype=torch.float32, device=device)
    return MicroBatch(zero[None], None, zero, zero, none, none, zero.bool(), zero, zero - 1)


def _joined(parts: Iterable[npt.NDArray[Any]], dtype: npt.DTypeLike, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(list(parts)).astype(dtype)).to(device)
