"""Micro-batch plan of a global batch:  sequences ─► data-parallel ranks ─► rows ─► micro-batches.

Every rank computes the whole plan from the same input, so it is not sent. The plan changes speed only, never the loss.
"""

from __future__ import annotations

from collections import defaultdict

from services.learner.groups.sequence import Sequence
from services.learner.training.batch import Row, padded_length, shared_tokens

MicroBatchPlan = list[Row]
"""The rows of one micro-batch; an empty micro-batch has none."""


def plan_micro_batches(
    sequences: list[Sequence], data_parallel_size: int, *, max_tokens: int, packing: bool, multiple: int = 1
) -> list[list[MicroBatchPlan]]:
    """For each data-parallel rank its micro-batches: equally many on every rank, at least one, each of at most `max_tokens` padded tokens.

    A sequence that is longer runs alone: a large micro-batch is better than a failed job. `multiple` divides the length of a row.
    """
    lengths = [s.row_len for s in sequences]
    plans = []
    for mine in split_over_ranks(lengths, data_parallel_size):
        rows: list[Row] = pack_rows(lengths, mine) if packing else [(i,) for i in mine]
        plans.append(fill_micro_batches(lengths, rows, max_tokens, multiple))
    return _equally_many(plans)


def plan_shared_prompts(
    sequences: list[Sequence], data_parallel_size: int, *, max_tokens: int, multiple: int = 1
) -> list[list[MicroBatchPlan]]:
    """The same for rows of sequences that share a prompt, of at most `max_tokens` computed tokens, the padding to `multiple` included.

    A group is divided, and its prompt computed once more, where it exceeds the bound or one rank's share of the batch.
    """
    max_tokens -= max_tokens % multiple
    prompts: dict[tuple[int, bytes], list[int]] = defaultdict(list)
    for i, s in enumerate(sequences):
        prompts[s.group_id, s.tokens[: s.prompt_len].tobytes()].append(i)
    groups = [tuple(group) for group in prompts.values()]
    share = -(-sum(shared_tokens(sequences, group) for group in groups) // data_parallel_size)
    rows = [
        part
        for group in groups
        for part in _divide(sequences, group, min(max_tokens, share + sequences[group[0]].prompt_len))
    ]
    lengths = [shared_tokens(sequences, row) for row in rows]
    plans: list[list[MicroBatchPlan]] = []
    for mine in _lightest_first(lengths, data_parallel_size):
        plans.append([])
        free = 0
        for r in mine:
            if not plans[-1] or lengths[r] > free:
                plans[-1].append([])
                free = max_tokens
            plans[-1][-1].append(rows[r])
            free -= lengths[r]
    return _equally_many(plans)


def _divide(sequences: list[Sequence], group: Row, most: int) -> list[Row]:
    """Parts of at most `most` tokens, each with the prompt, or of one sequence. Similar lengths are together: less padding in attention."""
    parts: list[list[int]] = []
    free = 0
    for i in sorted(group, key=lambda i: -sequences[i].response_len):
        own = sequences[i].response_len - 1
        if not parts or own > free:
            parts.append([])
            free = most - sequences[i].prompt_len
        parts[-1].append(i)
        free -= own
    return [tuple(part) for part in parts]


def _lightest_first(lengths: list[int], ranks: int) -> list[list[int]]:
    """Distributes indices, longest first, each to the rank with the fewest tokens: two ranks' sums differ by at most the longest."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for index in longest_first(lengths):
        rank = loads.index(min(loads))
        shares[rank].append(index)
        loads[rank] += lengths[index]
    return shares


def _equally_many(plans: list[list[MicroBatchPlan]]) -> list[list[MicroBatchPlan]]:
    """With empty micro-batches at the end, as many on every rank as on the one with most; at least one."""
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


def fill_micro_batches(lengths: list[int], rows: list[Row], max_tokens: int, multiple: int) -> list[MicroBatchPlan]:
    """Groups rows of similar length, longest first, up to `max_tokens` padded tokens."""
    row_lengths = [padded_length(sum(lengths[i] for i in row), multiple) for row in rows]
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
