"""Figures of a step are JSON, and a batch's optimizer steps count by their tokens."""

from __future__ import annotations

import pytest

from services.learner.training.stats import StepStats
from services.learner.training.update import LARGEST, Update, mean_of


def test_a_record_holds_json_values_only() -> None:
    stats = StepStats(
        step=2, loss=float("nan"), grad_norm=float("inf"), lr=1e-6, tokens=3, sequences=1, micro_batches=1, padding=0.0,
        skipped="why", metrics={"entropy": 1.5, "mismatch_kl_k3": float("inf")},
    )  # fmt: skip
    record = stats.as_record()
    assert (record["loss"], record["grad_norm"], record["mismatch_kl_k3"]) == (None, None, None)
    assert (record["entropy"], record["optimizer_step"], record["skipped"]) == (1.5, 2, "why")


def test_the_optimizer_steps_of_a_batch_count_by_their_tokens_and_the_largest_stays_the_largest() -> None:
    first = Update(1.0, 4.0, 30, "", {"entropy": 2.0, LARGEST: 0.5})
    second = Update(3.0, 8.0, 10, "not finite", {"entropy": 6.0, LARGEST: 0.25})
    mean = mean_of([first, second])
    assert (mean.loss, mean.grad_norm, mean.tokens, mean.skipped) == (1.5, 5.0, 40, "not finite")
    assert mean.metrics == {"entropy": 3.0, LARGEST: 0.5}
    assert mean_of([first]) is first


def test_an_optimizer_step_that_is_not_finite_shows_in_the_mean() -> None:
    bad = Update(float("nan"), 1.0, 10, "why", {})
    assert mean_of([bad, Update(1.0, 1.0, 10, "", {})]).loss != pytest.approx(1.0)
