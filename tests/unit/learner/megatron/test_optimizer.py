"""The rate follows the warm-up, and a step's figures are JSON."""

from __future__ import annotations

from services.common.spec.learner import LearnerSpec
from services.learner.megatron.optimizer import learning_rate
from services.learner.megatron.stats import StepStats


def test_the_rate_rises_linearly_and_stays() -> None:
    spec = LearnerSpec(lr=8e-6, lr_warmup_steps=4)
    assert [learning_rate(spec, step) for step in range(1, 7)] == [2e-6, 4e-6, 6e-6, 8e-6, 8e-6, 8e-6]


def test_without_warm_up_the_first_step_has_the_full_rate() -> None:
    assert learning_rate(LearnerSpec(lr=3e-4, lr_warmup_steps=0), 1) == 3e-4


def test_a_record_holds_json_values_only() -> None:
    stats = StepStats(
        step=2, loss=float("nan"), grad_norm=float("inf"), lr=1e-6, tokens=3, sequences=1, micro_batches=1, padding=0.0,
        skipped="why", metrics={"entropy": 1.5, "mismatch_kl_k3": float("inf")},
    )  # fmt: skip
    record = stats.as_record()
    assert (record["loss"], record["grad_norm"], record["mismatch_kl_k3"]) == (None, None, None)
    assert (record["entropy"], record["optimizer_step"], record["skipped"]) == (1.5, 2, "why")
