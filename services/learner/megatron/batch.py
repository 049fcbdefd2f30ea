"""Micro-batches as tensors:  Sequence (one rollout)  ─► Row (one or more of them)  ─► MicroBatch (tensors)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from services.learner.groups.sequence import Sequence

Row = tuple[int, ...]
"""Indices of the sequences in a row, in their order within it."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows padded on the right to one length, and their response tokens, concatenated: R over all rows.

    A micro-batch without sequences still runs, since pipeline and data parallelism need equal counts: one token, whose mask is False.
    """

    tokens: torch.Tensor
    """int64 [b, s]."""
    segment_ids: torch.Tensor | None
    """int64 [b, s], the position's sequence within the row; −1 is padding. None where each row has one sequence."""
    positions: torch.Tensor
    """int64 [R], index into the flattened [s, b] hidden states that predict the token: position · b + row."""
    targets: torch.Tensor
    """int64 [R], the response tokens."""
    inference_logprobs: torch.Tensor
    """float32 [R]."""
    advantages: torch.Tensor
    """float32 [R]."""
    loss_mask: torch.Tensor
    """bool [R]."""
    sequence_ids: torch.Tensor
    """int64 [R], ordinal of the token's sequence within this micro-batch, never decreasing."""
    offsets: torch.Tensor
    """int64 [R], the token's place among the response tokens of the global batch; −1 for the one token of an empty micro-batch."""


def collate(sequences: list[Sequence], rows: list[Row], offsets: list[int], device: torch.device) -> MicroBatch:
    """The micro-batch of these rows of the global batch `sequences`, whose `response_offsets` are `offsets`."""
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
    """For each sequence, the place of its first response token among all of the batch; and as last element their number."""
    return [0, *np.cumsum([s.response_len for s in sequences], dtype=np.int64).tolist()]


def _empty(device: torch.device) -> MicroBatch:
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    none = torch.zeros(1, dtype=torch.float32, device=device)
    return MicroBatch(zero[None], None, zero, zero, none, none, zero.bool(), zero, zero - 1)


def _joined(parts: Iterable[npt.NDArray[Any]], dtype: npt.DTypeLike, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(list(parts)).astype(dtype)).to(device)
