"""Padding: which rows of a batch go through the model together, so that little of what is computed is padding."""

from __future__ import annotations

from collections.abc import Sequence


def micro_batches(lengths: Sequence[int], most_tokens: int, *, most_rows: int | None = None) -> list[list[int]]:
    """Indices of rows, the longest first; rows × longest is at most `most_tokens` in each, a lone row apart. Every row is in one.

    Example: micro_batches([3, 9, 4], 10) is [[1], [2, 0]].
    """
    batches: list[list[int]] = []
    widest = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not batches or (len(batches[-1]) + 1) * widest > most_tokens or len(batches[-1]) == most_rows:
            batches.append([])
            widest = lengths[index]
        batches[-1].append(index)
    return batches
