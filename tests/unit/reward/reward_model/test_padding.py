"""Rows of a reward model's batch: each once, none with more padding than the limit leaves."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.reward.reward_model.padding import micro_batches
from services.reward.reward_model.reward_model import sigmoid


@given(st.lists(st.integers(1, 500), max_size=60), st.integers(1, 2000), st.one_of(st.none(), st.integers(1, 4)))
def test_every_row_is_in_one_micro_batch_within_the_limits(lengths: list[int], most: int, rows: int | None) -> None:
    batches = micro_batches(lengths, most, most_rows=rows)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[index] for index in batch) <= most
        assert rows is None or len(batch) <= rows


def test_rows_of_like_length_go_together() -> None:
    assert micro_batches([3, 9, 4], 10) == [[1], [2, 0]]


@pytest.mark.parametrize("value", [-1e9, -800.0, -1.0, 0.0, 1.0, 800.0, 1e9])
def test_a_sigmoid_is_within_0_to_1_for_any_number(value: float) -> None:
    assert 0.0 <= sigmoid(value) <= 1.0
    assert math.isclose(sigmoid(value) + sigmoid(-value), 1.0)
