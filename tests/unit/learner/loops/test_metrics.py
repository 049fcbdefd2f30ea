"""What the learner's metrics say of a step: not finite is NaN and counted, never the value of the step before."""

from __future__ import annotations

import math

from prometheus_client import REGISTRY

from services.common.jobs.step_record import StepRecord
from services.learner.loops import metrics
from services.learner.training.stats import StepStats


def record(stats: StepStats, not_judged: int = 0) -> StepRecord:
    return StepRecord(
        step=3,
        step_s=1.0,
        trained_tokens=10,
        wasted_tokens=2,
        rollouts_not_judged=not_judged,
        reward=0.5,
        accuracy=None,
        **stats.as_record(),
    )


def stats(loss: float, skipped: str = "", tokens: int = 10) -> StepStats:
    return StepStats(3, loss, loss, 1e-4, tokens, 2, 1, 0.0, skipped, {"entropy": 1.5, "clip_fraction_low": 0.25})


def sample(name: str, **labels: str) -> float:
    value = REGISTRY.get_sample_value(f"millrace_learner_{name}", labels)
    assert value is not None, name
    return value


def test_a_sound_step_sets_its_figures() -> None:
    before = sample("steps_total")
    metrics.observe_step(record(stats(0.25)), [0, 1, 1])
    assert sample("loss") == 0.25
    assert sample("reward") == 0.5
    assert sample("entropy_nats") == 1.5
    assert sample("clipped_tokens_ratio", side="low") == 0.25
    assert math.isnan(sample("accuracy_ratio"))
    assert sample("steps_total") == before + 1


ROLES = {
    "value_loss": 0.5, "explained_variance": -0.25, "value_clip_fraction": 0.125, "value_mean": 0.75, "return_mean": 0.625,
    "critic_grad_norm": 2.0, "critic_lr": 1e-5, "reference_kl": 0.03, "kl_coefficient": 0.04, "optimizer_steps": 4.0,
    "clip_fraction_dual": 0.01, "importance_weight": 1.5, "mask_fraction_positive": 0.02, "mask_fraction_negative": 0.03,
}  # fmt: skip


def test_the_figures_of_critic_and_reference_have_gauges_of_their_own() -> None:
    step = record(StepStats(4, 0.25, 1.0, 1e-4, 10, 2, 1, 0.0, metrics=ROLES))
    metrics.observe_step(step, [0])
    assert step.optimizer_steps == 4
    expected = {
        "value_loss": 0.5, "explained_variance_ratio": -0.25, "clipped_values_ratio": 0.125, "critic_gradient_norm": 2.0,
        "critic_learning_rate": 1e-5, "reference_kl_nats": 0.03, "kl_coefficient": 0.04, "optimizer_steps": 4.0,
        "importance_weight": 1.5,
    }  # fmt: skip
    assert {name: sample(name) for name in expected} == expected
    assert (sample("value", of="values"), sample("value", of="returns")) == (0.75, 0.625)
    assert sample("clipped_tokens_ratio", side="dual") == 0.01
    masked = [sample("masked_tokens_ratio", advantage=sign) for sign in ("positive", "negative")]
    assert masked == [0.02, 0.03]


def test_the_figures_of_routers_have_gauges_of_their_own() -> None:
    figures = {"router_load_max": 1.5, "router_load_min": 0.25, "router_entropy": 0.75, "router_balance_loss": 1.125}
    metrics.observe_step(record(StepStats(4, 0.25, 1.0, 1e-4, 10, 2, 1, 0.0, metrics=figures)), [0])
    assert sample("router_load_ratio", expert="busiest") == 1.5
    assert sample("router_load_ratio", expert="least busy") == 0.25
    assert (sample("router_entropy_nats"), sample("router_balance_loss")) == (0.75, 1.125)


def test_a_step_of_the_critic_alone_shows_no_loss_of_the_actor() -> None:
    metrics.observe_step(record(stats(0.25)), [0])
    before = sample("skipped_steps_total", reason="not_finite")
    warm_up = {"value_loss": 0.5, "optimizer_steps": 0.0}
    step = record(StepStats(1, math.nan, math.nan, 0.0, 10, 2, 1, 0.0, metrics=warm_up))
    metrics.observe_step(step, [0])
    assert (step.loss, step.grad_norm, step.optimizer_steps) == (None, None, 0)
    assert math.isnan(sample("loss"))
    assert sample("optimizer_steps") == 0
    assert sample("skipped_steps_total", reason="not_finite") == before, "it is no failure"


def test_a_job_without_roles_leaves_their_figures_out_of_its_record() -> None:
    assert not ROLES.keys() & record(stats(0.25)).as_json().keys()


def test_rollouts_without_a_verdict_are_counted() -> None:
    before = sample("unjudged_rollouts_total")
    metrics.observe_step(record(stats(0.25), not_judged=3), [0])
    assert sample("unjudged_rollouts_total") == before + 3


def test_a_loss_that_is_not_finite_is_nan_and_counted() -> None:
    metrics.observe_step(record(stats(0.25)), [0])
    before = sample("skipped_steps_total", reason="not_finite")
    metrics.observe_step(record(stats(math.inf, "loss inf and gradient norm nan are not both finite")), [0])
    assert math.isnan(sample("loss"))
    assert math.isnan(sample("gradient_norm"))
    assert sample("skipped_steps_total", reason="not_finite") == before + 1


def test_a_step_without_tokens_is_no_alarm() -> None:
    before = sample("skipped_steps_total", reason="not_finite"), sample("skipped_steps_total", reason="no_tokens")
    metrics.observe_step(record(stats(0.0, "no token to train on", tokens=0)), [0])
    after = sample("skipped_steps_total", reason="not_finite"), sample("skipped_steps_total", reason="no_tokens")
    assert after == (before[0], before[1] + 1)


def test_an_evaluation_without_answers_changes_nothing() -> None:
    counts = {"rollouts_judged": 12, "rollouts_not_judged": 3, "checks_over_limit": 2}
    metrics.observe_evaluation({"avg_at_k": 0.5, "pass_at_k": 0.75} | counts)
    assert [sample("eval_rollouts", outcome=name) for name in ("judged", "not_judged", "over_limit")] == [12, 3, 2]
    none = {"rollouts_judged": 0, "rollouts_not_judged": 15, "checks_over_limit": 0}
    metrics.observe_evaluation({"avg_at_k": None, "pass_at_k": None} | none)
    assert sample("eval_accuracy_ratio", statistic="avg_at_k") == 0.5
    assert sample("eval_accuracy_ratio", statistic="pass_at_k") == 0.75
