"""Micro-batch plan of a global batch:  sequences ─► data-parallel ranks ─► rows ─► micro-batches.

Every rank computes the whole plan from the same input, so it is not sent. The plan changes speed only, never the loss.
"""

from __future__ import annotations

from services.learner.groups.sequence import Sequence
from services.learner.megatron.batch import Row

MicroBatchPlan = list[Row]
"""The rows of one micro-batch; an empty micro-batch has none."""


def plan_micro_batches(
    sequences: list[Sequence], data_parallel_size: int, *, max_tokens: int, packing: bool
) -> list[list[MicroBatchPlan]]:
    """For each data-parallel rank its micro-batches: equally many on every rank, at least one, each of at most `max_tokens` padded tokens.

    A sequence that is longer runs alone: a large micro-batch is better than a failed job.
    """
    lengths = [s.row_len for s in sequences]
    plans = []
    for mine in split_over_ranks(lengths, data_parallel_size):
        rows: list[Row] = pack_rows(lengths, mine) if packing else [(i,) for i in mine]
        plans.append(fill_micro_batches(lengths, rows, max_tokens))
    count = max(1, *(len(plan) for plan in plans))
    return [plan + [[] for _ in range(count - len(plan))] for plan in plans]


def split_over_ranks(lengths: list[int], ranks: int) -> list[list[int]]:
    """Distributes indices, longest first, forwards and backwards in turn: two ranks' sums differ by at most the longest sequence."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for place, index in enumerate(longest_first(lengths)):
        turn, rank = divmod(place, ranks)
        shares[rank if turn % 2 == 0 else ranks - 1 - rank].append(index)
    return shares


def pack_rows(lengths: list[int], indices: list[int]) -> list[Row]:
    """First-fit-decreasing into rows no longer than the longest sequence: the cost of attention grows with the square of the row."""
    capacity = max((lengths[i] for i in indices), default=0)
    rows: list[list[int]] = []
    free: list[int] = []
    for i in indices:
        fitting = next((r for r, tokens in enumerate(free) if tokens >= lengths[i]), None)
        if fitting is None:
            rows.append([i])
            free.append(capacity - lengths[i])
        else:
            rows[fitting].append(i)
            free[fitting] -= lengths[i]
    return [tuple(row) for row in rows]


def fill_micro_batches(lengths: list[int], rows: list[Row], max_tokens: int) -> list[MicroBatchPlan]:
    """Groups rows of similar length, longest first, up to `max_tokens` padded tokens."""
    row_lengths = [sum(lengths[i] for i in row) for row in rows]
    plan: list[MicroBatchPlan] = []
    width = 0
    for r in longest_first(row_lengths):
        if not plan or width * (len(plan[-1]) + 1) > max_tokens:
            plan.append([])
            width = row_lengths[r]
        plan[-1].append(rows[r])
    return plan


def longest_first(lengths: list[int]) -> list[int]:
    """Indices by decreasing length; equal lengths keep their order."""
    return sorted(range(len(lengths)), key=lambda i: -lengths[i])
