"""A group is kept exactly if its values differ."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.spec.choices import AdvantageEstimator
from services.learner.algorithms.advantages import is_degenerate
from services.learner.algorithms.outcomes import batch_advantages

VALUES = st.lists(st.one_of(st.sampled_from([0.0, 0.1, 1.0]), st.floats(-1e3, 1e3)), min_size=2, max_size=16)


@given(VALUES)
def test_a_group_is_degenerate_exactly_if_its_exact_variance_is_zero(values: list[float]) -> None:
    exact = [Fraction(value) for value in values]
    mean = sum(exact, Fraction(0)) / len(exact)
    assert is_degenerate(values) is (sum((value - mean) ** 2 for value in exact) == 0)


@given(st.integers(1, 64), st.integers(0, 64))
def test_right_and_wrong_answers_keep_a_group_only_together(size: int, right: int) -> None:
    right = min(right, size)
    assert is_degenerate([1.0] * right + [0.0] * (size - right)) is (right in {0, size})


@given(st.floats(-1e6, 1e6), st.integers(2, 16))
def test_equal_values_are_degenerate_however_their_mean_rounds(value: float, size: int) -> None:
    assert is_degenerate([value] * size)


@given(VALUES)
def test_a_degenerate_group_has_no_advantage(values: list[float]) -> None:
    (advantages,) = batch_advantages([values], AdvantageEstimator.DR_GRPO, [[1] * len(values)])
    if is_degenerate(values):
        assert abs(advantages).max() < 1e-9


def test_none_or_one_value_carries_no_comparison() -> None:
    assert is_degenerate([])
    assert is_degenerate([1.0])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        is_degenerate([0.0, value])
