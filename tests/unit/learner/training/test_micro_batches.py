"""How a batch is split: every sequence once, within the bound, the same number of micro-batches on every rank."""

from __future__ import annotations

from itertools import chain

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.learner.groups.sequence import Sequence
from services.learner.training.batch import padded_length, shared_tokens
from services.learner.training.micro_batches import plan_micro_batches, plan_shared_prompts, split_over_ranks


def sequence(prompt: int, response: int, group_id: int = 0) -> Sequence:
    return Sequence(
        tokens=np.arange(prompt + response, dtype=np.int32),
        prompt_len=prompt,
        inference_logprobs=np.zeros(response, np.float32),
        advantage=np.ones(response, np.float32),
        loss_mask=np.ones(response, bool),
        group_id=group_id,
    )


SHAPES = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 40)), max_size=40)


@given(SHAPES, st.integers(1, 5), st.integers(64, 400), st.booleans(), st.sampled_from([1, 2, 8]))
def test_every_sequence_is_planned_once_within_the_bound(
    shapes: list[tuple[int, int]], ranks: int, max_tokens: int, packing: bool, multiple: int
) -> None:
    sequences = [sequence(*shape) for shape in shapes]
    plans = plan_micro_batches(sequences, ranks, max_tokens=max_tokens, packing=packing, multiple=multiple)
    assert len(plans) == ranks
    assert len({len(plan) for plan in plans}) == 1
    assert len(plans[0]) >= 1
    micro_batches = list(chain.from_iterable(plans))
    assert sorted(i for rows in micro_batches for row in rows for i in row) == list(range(len(sequences)))
    for rows in micro_batches:
        width = max((sum(sequences[i].row_len for i in row) for row in rows), default=0)
        assert padded_length(width, multiple) * len(rows) <= max_tokens
        assert packing or all(len(row) == 1 for row in rows)


@given(st.lists(st.integers(1, 500), max_size=60), st.integers(1, 8))
def test_no_rank_gets_more_than_one_longest_sequence_above_another(lengths: list[int], ranks: int) -> None:
    loads = [sum(lengths[i] for i in mine) for mine in split_over_ranks(lengths, ranks)]
    assert max(loads) - min(loads) <= max(lengths, default=0)


GROUPS = st.lists(st.tuples(st.integers(1, 20), st.lists(st.integers(1, 40), min_size=1, max_size=6)), max_size=12)


@given(GROUPS, st.integers(1, 5), st.integers(66, 400), st.sampled_from([1, 2, 8]))
def test_shared_prompts_are_planned_once_within_the_bound_and_evenly(
    groups: list[tuple[int, list[int]]], ranks: int, max_tokens: int, multiple: int
) -> None:
    sequences = [sequence(prompt, n, i) for i, (prompt, responses) in enumerate(groups) for n in responses]
    plans = plan_shared_prompts(sequences, ranks, max_tokens=max_tokens, multiple=multiple)
    assert len(plans) == ranks
    assert len({len(plan) for plan in plans}) == 1
    micro_batches = list(chain.from_iterable(plans))
    assert len(micro_batches) >= ranks
    rows = [row for rows in micro_batches for row in rows]
    assert sorted(i for row in rows for i in row) == list(range(len(sequences)))
    assert all(len({sequences[i].group_id for i in row}) == 1 for row in rows)
    costs = [[shared_tokens(sequences, row) for row in rows] for rows in micro_batches]
    assert all(padded_length(sum(cost), multiple) <= max_tokens for cost in costs)
    loads = [sum(shared_tokens(sequences, row) for rows in plan for row in rows) for plan in plans]
    assert max(loads) - min(loads) <= max((cost for rows in costs for cost in rows), default=0)


def test_a_group_that_exceeds_a_ranks_share_is_divided() -> None:
    sequences = [sequence(10, 20) for _ in range(8)]
    plans = plan_shared_prompts(sequences, 2, max_tokens=4096)
    assert [[len(row) for rows in plan for row in rows] for plan in plans] == [[4], [4]]


def test_packing_pads_less() -> None:
    sequences = [sequence(4, 60), *(sequence(4, 12) for _ in range(8)), *(sequence(4, 28) for _ in range(4))]

    def computed(*, packing: bool) -> int:
        (plan,) = plan_micro_batches(sequences, 1, max_tokens=1000, packing=packing)
        return sum(len(rows) * max(sum(sequences[i].row_len for i in row) for row in rows) for rows in plan)

    assert computed(packing=True) < computed(packing=False) / 2


def test_the_plan_is_the_same_every_time() -> None:
    sequences = [sequence(3, 1 + i % 7, i) for i in range(50)]
    first = plan_micro_batches(sequences, 3, max_tokens=64, packing=True)
    assert first == plan_micro_batches(sequences, 3, max_tokens=64, packing=True)


def test_a_sequence_longer_than_the_bound_runs_alone() -> None:
    sequences = [sequence(5, 20), sequence(2, 3), sequence(2, 3)]
    (plan,) = plan_micro_batches(sequences, 1, max_tokens=16, packing=False)
    assert plan == [[(0,)], [(1,), (2,)]]
