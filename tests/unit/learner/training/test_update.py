"""Tests of the mean over the optimizer steps of a batch."""

from __future__ import annotations

import pytest

from services.learner.training.update import LARGEST, Update, mean_of


def update(tokens: int, loss: float, metrics: dict[str, float], skipped: str = "") -> Update:
    return Update(loss=loss, grad_norm=2 * loss, tokens=tokens, skipped=skipped, metrics=metrics)


def test_a_mean_is_weighted_by_tokens() -> None:
    merged = mean_of([update(30, 1.0, {"entropy": 2.0}), update(10, 5.0, {"entropy": 6.0})])
    assert (merged.tokens, merged.loss, merged.grad_norm) == (40, 2.0, 4.0)
    assert merged.metrics == {"entropy": 3.0}


def test_the_largest_difference_is_that_of_all_and_the_first_reason_stays() -> None:
    parts = [update(1, 0.0, {LARGEST: 0.5}), update(9, 0.0, {LARGEST: 0.25}, "first"), update(9, 0.0, {}, "second")]
    merged = mean_of(parts)
    assert merged.metrics == {LARGEST: 0.5}
    assert merged.skipped == "first"


def test_a_metric_that_some_updates_lack_is_the_mean_over_those_that_have_it() -> None:
    merged = mean_of(
        [update(30, 0.0, {"always": 1.0}), update(10, 0.0, {"always": 1.0, "own": 4.0}), update(30, 0.0, {"own": 8.0})]
    )
    assert merged.metrics == pytest.approx({"always": 1.0, "own": 7.0})
