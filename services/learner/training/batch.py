"""Micro-batches as tensors:  Sequence (one rollout)  ─► Row (one or more of them)  ─► MicroBatch (tensors)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from services.learner.groups.sequence import Sequence
from services.learner.training.prompt_sharing import Segment, encode_segments

Row = tuple[int, ...]
"""Indices of the sequences in a row, in their order within it; where prompts are shared, of sequences with one prompt."""


class RowForm(Enum):
    """How sequences lie in the rows of a micro-batch."""

    SHARED = auto()
    """One row of prompts, each followed by its responses."""
    JOINED = auto()
    """One row of whole sequences, each with a prompt of its own."""
    PADDED = auto()
    """A row each, padded on the right to one length; of recorded jobs also several in a row."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows, and their response tokens, concatenated: R over all rows.

    With sequence parallelism the length is a multiple of TP, and padding fills the rest. A micro-batch without sequences still runs, since
    pipeline and data parallelism need equal counts: one token, whose mask is False.
    """

    tokens: torch.Tensor
    """int64 [b, s]."""
    attention: torch.Tensor | None
    """The mask of `block_diagonal_mask`, or the segments of `encode_segments`, on the CPU; None for one sequence a row."""
    position_ids: torch.Tensor | None
    """int64 [s], each token's position in its sequence; None for padded rows, through which they count."""
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
    form: RowForm = RowForm.PADDED,
    multiple: int = 1,
) -> MicroBatch:
    """The micro-batch of these rows of the global batch `sequences`, whose `response_offsets` are `offsets`.

    In the form SHARED the sequences of a row have one prompt, which is computed once. `multiple` divides the length.
    """
    if not rows:
        return _empty(device, multiple, joined=form is not RowForm.PADDED)
    match form:
        case RowForm.SHARED:
            layout = _lay_out_shared(sequences, rows, multiple)
        case RowForm.JOINED:
            layout = _lay_out_joined(sequences, rows, multiple)
        case RowForm.PADDED:
            layout = _lay_out(sequences, rows, multiple)
    is_padded = form is RowForm.PADDED
    order = [i for row in rows for i in row]
    responses = [sequences[i] for i in order]
    counts = [s.response_len for s in responses]
    return MicroBatch(
        tokens=torch.from_numpy(layout.tokens).to(device),
        attention=layout.attention.to(device) if is_padded and layout.attention is not None else layout.attention,
        position_ids=None if is_padded else _joined(layout.position_ids, np.int64, device),
        positions=_joined(layout.positions, np.int64, device),
        targets=_joined([s.tokens[s.prompt_len :] for s in responses], np.int64, device),
        inference_logprobs=_joined([s.inference_logprobs for s in responses], np.float32, device),
        loss_mask=_joined([s.loss_mask for s in responses], np.bool_, device),
        sequence_ids=torch.from_numpy(np.repeat(np.arange(len(order), dtype=np.int64), counts)).to(device),
        offsets=_joined([offsets[i] + np.arange(n) for i, n in zip(order, counts, strict=True)], np.int64, device),
    )


def block_diagonal_mask(segment_ids: torch.Tensor) -> torch.Tensor:
    """The mask of packed rows from segment ids, int64 [b, s]: a position attends to itself and to earlier ones of its segment.

    It is bool [b, 1, s, s], True where a query (third axis) may attend to a key (fourth).
    """
    return (segment_ids[:, :, None] == segment_ids[:, None, :]).tril()[:, None]


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
    position_ids: list[npt.NDArray[np.int64]]
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


def _lay_out_joined(sequences: list[Sequence], rows: list[Row], multiple: int) -> _Layout:
    mine = [sequences[i] for row in rows for i in row]
    starts = np.cumsum([0, *(s.row_len for s in mine)])
    padding = padded_length(int(starts[-1]), multiple) - int(starts[-1])
    lengths = [
        *(s.row_len for s in mine[:-1]),
        mine[-1].row_len + padding,
    ]  # no position of the last one attends to what follows it
    return _Layout(
        np.concatenate([*(s.tokens[:-1] for s in mine), np.zeros(padding, np.int32)]).astype(np.int64)[None],
        encode_segments([Segment(length, is_prompt=True) for length in lengths]),
        [np.arange(length) for length in lengths],
        [start + s.prompt_len - 1 + np.arange(s.response_len) for start, s in zip(starts[:-1], mine, strict=True)],
    )


def _lay_out_shared(sequences: list[Sequence], rows: list[Row], multiple: int) -> _Layout:
    tokens, segments, position_ids, positions = [], [], [], []
    start = 0
    for row in rows:
        prompt_len = sequences[row[0]].prompt_len
        last = start + prompt_len - 1
        tokens.append(sequences[row[0]].tokens[:prompt_len])
        segments.append(Segment(prompt_len, is_prompt=True))
        position_ids.append(np.arange(prompt_len))
        start += prompt_len
        for s in (sequences[i] for i in row):
            own = s.response_len - 1  # the first response token is predicted from the prompt, the last is no input
            positions.append(np.concatenate([[last], start + np.arange(own)]))
            if own:
                tokens.append(s.tokens[prompt_len:-1])
                segments.append(Segment(own, is_prompt=False))
                position_ids.append(prompt_len + np.arange(own))
            start += own
    if padding := padded_length(start, multiple) - start:
        # Part of the last segment: no position before it attends to it, and no segment after it.
        length, is_prompt = segments[-1]
        segments[-1] = Segment(length + padding, is_prompt)
        tokens.append(np.zeros(padding, np.int32))
        position_ids.append(position_ids[-1][-1] + 1 + np.arange(padding))
    row_of_all = np.concatenate(tokens).astype(np.int64)[None]
    return _Layout(row_of_all, encode_segments(segments), position_ids, positions)


def _empty(device: torch.device, multiple: int, *, joined: bool) -> MicroBatch:
    tokens = torch.zeros(1, multiple, dtype=torch.int64, device=device)
    segments = encode_segments([Segment(multiple, is_prompt=True)]) if joined else None
    position_ids = torch.arange(multiple, device=device) if joined else None
    zero = tokens[0, :1]
    none = torch.zeros(1, dtype=torch.float32, device=device)
    return MicroBatch(tokens, segments, position_ids, zero, zero, none, zero.bool(), zero, zero - 1)


def _joined(parts: Iterable[npt.NDArray[Any]], dtype: npt.DTypeLike, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(list(parts)).astype(dtype)).to(device)
