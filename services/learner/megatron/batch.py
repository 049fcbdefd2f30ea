"""Micro-batches as tensors:  Sequence (one rollout)  ─► Row (one or more of them)  ─► MicroBatch (tensors)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from services.learner.groups.sequence import Sequence
from services.learner.megatron.attention import block_diagonal_mask
from services.learner.megatron.prompt_sharing import Segment, encode_segments

Row = tuple[int, ...]
"""Indices of the sequences in a row, in their order within it; where prompts are shared, of sequences with one prompt."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows padded on the right to one length, and their response tokens, concatenated: R over all rows.

    Where prompts are shared all rows are one. With sequence parallelism the length is a multiple of TP, and padding fills the rest. A
    micro-batch without sequences still runs, since pipeline and data parallelism need equal counts: one token, whose mask is False.
    """

    tokens: torch.Tensor
    """int64 [b, s]."""
    attention: torch.Tensor | None
    """The mask of `block_diagonal_mask`, or the segments of `encode_segments`; None for one sequence a row."""
    rotary_positions: torch.Tensor | None
    """int64 [s], each token's position in its sequence; None where they count through the row."""
    positions: torch.Tensor
    """int64 [R], index into the flattened [s, b] hidden states that predict the token: position · b + row."""
    targets: torch.Tensor
    """int64 [R], the response tokens."""
    inference_logprobs: torch.Tensor
    """float32 [R]."""
    loss_mask: torch.Tensor
    """bool [R]."""
    sequence_ids: torch.Tensor
    """int64 [R], ordinal of the token's sequence within this micro-batch, never decreasing."""
    offsets: torch.Tensor
    """int64 [R], the token's place among the response tokens of the global batch; −1 for the one token of an empty micro-batch."""
    own: torch.Tensor | None = None
    """int64, which of the R tokens this rank predicts, and has in `positions`, where context parallelism divides the row; None for all."""


def collate(
    sequences: list[Sequence],
    rows: list[Row],
    offsets: list[int],
    device: torch.device,
    *,
    shared: bool = False,
    multiple: int = 1,
) -> MicroBatch:
    """The micro-batch of these rows of the global batch `sequences`, whose `response_offsets` are `offsets`.

    With `shared` the sequences of a row have one prompt, which is computed once. `multiple` divides the length.
    """
    if not rows:
        return _empty(device, multiple)
    layout = _lay_out_shared(sequences, rows, multiple) if shared else _lay_out(sequences, rows, multiple)
    order = [i for row in rows for i in row]
    responses = [sequences[i] for i in order]
    counts = [s.response_len for s in responses]
    return MicroBatch(
        tokens=torch.from_numpy(layout.tokens).to(device),
        attention=layout.attention if layout.attention is None or shared else layout.attention.to(device),
        rotary_positions=_joined(layout.rotary_positions, np.int64, device) if shared else None,
        positions=_joined(layout.positions, np.int64, device),
        targets=_joined([s.tokens[s.prompt_len :] for s in responses], np.int64, device),
        inference_logprobs=_joined([s.inference_logprobs for s in responses], np.float32, device),
        loss_mask=_joined([s.loss_mask for s in responses], np.bool_, device),
        sequence_ids=torch.from_numpy(np.repeat(np.arange(len(order), dtype=np.int64), counts)).to(device),
        offsets=_joined([offsets[i] + np.arange(n) for i, n in zip(order, counts, strict=True)], np.int64, device),
    )


def response_offsets(sequences: list[Sequence]) -> list[int]:
    """For each sequence, the place of its first response token among all of the batch; and as last element their number."""
    return [0, *np.cumsum([s.response_len for s in sequences], dtype=np.int64).tolist()]


def shared_tokens(sequences: list[Sequence], row: Row) -> int:
    """Positions that the model computes for sequences with one prompt: the last token of each is only predicted."""
    return sequences[row[0]].prompt_len + sum(sequences[i].response_len - 1 for i in row)


def padded_length(length: int, multiple: int) -> int:
    """The next multiple that is not below the length."""
    return -(-length // multiple) * multiple


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where everything lies in the rows; the fields are those of MicroBatch."""

    tokens: npt.NDArray[np.int64]
    attention: torch.Tensor | None
    rotary_positions: list[npt.NDArray[np.int64]]
    positions: list[npt.NDArray[np.int64]]


def _lay_out(sequences: list[Sequence], rows: list[Row], multiple: int) -> _Layout:
    length = padded_length(max(sum(sequences[i].row_len for i in row) for row in rows), multiple)
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
    packed = any(len(row) > 1 for row in rows)
    return _Layout(tokens, block_diagonal_mask(torch.from_numpy(segments)) if packed else None, [], positions)


def _lay_out_shared(sequences: list[Sequence], rows: list[Row], multiple: int) -> _Layout:
    tokens, segments, rotary_positions, positions = [], [], [], []
    start = 0
    for row in rows:
        prompt_len = sequences[row[0]].prompt_len
        last = start + prompt_len - 1
        tokens.append(sequences[row[0]].tokens[:prompt_len])
        segments.append(Segment(prompt_len, is_prompt=True))
        rotary_positions.append(np.arange(prompt_len))
        start += prompt_len
        for s in (sequences[i] for i in row):
            own = s.response_len - 1  # the first response token is predicted from the prompt, the last is no input
            positions.append(np.concatenate([[last], start + np.arange(own)]))
            if own:
                tokens.append(s.tokens[prompt_len:-1])
                segments.append(Segment(own, is_prompt=False))
                rotary_positions.append(prompt_len + np.arange(own))
            start += own
    if padding := padded_length(start, multiple) - start:
        # Part of the last segment: no position before it attends to it, and no segment after it.
        length, is_prompt = segments[-1]
        segments[-1] = Segment(length + padding, is_prompt)
        tokens.append(np.zeros(padding, np.int32))
        rotary_positions.append(rotary_positions[-1][-1] + 1 + np.arange(padding))
    row_of_all = np.concatenate(tokens).astype(np.int64)[None]
    return _Layout(row_of_all, encode_segments(segments), rotary_positions, positions)


def _empty(device: torch.device, multiple: int) -> MicroBatch:
    tokens = torch.zeros(1, multiple, dtype=torch.int64, device=device)
    zero = tokens[0, :1]
    none = torch.zeros(1, dtype=torch.float32, device=device)
    return MicroBatch(tokens, None, None, zero, zero, none, zero.bool(), zero, zero - 1)


def _joined(parts: Iterable[npt.NDArray[Any]], dtype: npt.DTypeLike, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(list(parts)).astype(dtype)).to(device)
