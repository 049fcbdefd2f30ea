"""The punishment at its corners, with the figures of the paper."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.learner.algorithms.advantages import overlong_penalty


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (0, 0.0),
        (16383, 0.0),
        (16384, 0.0),  # L − B: the last length without punishment
        (16385, -1 / 4096),
        (18432, -0.5),
        (20479, -4095 / 4096),
        (20480, -1.0),  # L
        (20481, -1.0),
        (10**6, -1.0),
    ],
)
def test_the_punishment_is_exact_at_its_corners(length: int, expected: float) -> None:
    assert overlong_penalty(length, rollout_max_tokens=20480, overlong_buffer=4096, penalty_factor=1.0) == expected


@given(st.integers(1, 500), st.integers(0, 500), st.integers(0, 1200), st.floats(0.0, 5.0))
def test_longer_is_never_better_and_the_factor_is_the_bound(buffer: int, rest: int, length: int, factor: float) -> None:
    def penalty(tokens: int) -> float:
        return overlong_penalty(tokens, rollout_max_tokens=buffer + rest, overlong_buffer=buffer, penalty_factor=factor)

    assert -factor <= penalty(length + 1) <= penalty(length) <= 0.0
    assert penalty(rest) == 0.0
    assert penalty(buffer + rest) == -factor


@pytest.mark.parametrize(
    ("buffer", "factor", "named"),
    [
        (0, 1.0, "overlong_buffer"),
        (101, 1.0, "overlong_buffer"),
        (10, -0.1, "penalty_factor"),
        (10, float("nan"), "penalty_factor"),
    ],
)
def test_settings_that_do_not_fit_are_named(buffer: int, factor: float, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        overlong_penalty(5, rollout_max_tokens=100, overlong_buffer=buffer, penalty_factor=factor)
