"""Bad settings name their field, and the rate follows the warm-up."""

from __future__ import annotations

import pytest

from services.common.errors import ConfigError
from services.learner.megatron.optimizer import learning_rate
from services.learner.megatron.settings import TrainerSettings
from services.learner.megatron.stats import StepStats


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tensor_parallel_size", 0),
        ("max_tokens_per_micro_batch", 0),
        ("lr", 0.0),
        ("temperature", -1.0),
        ("clip_grad", -0.1),
    ],
)
def test_a_value_out_of_range_names_its_field(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        TrainerSettings(**{field: value})  # type: ignore[arg-type]


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="dtype must be float32 or bfloat16, not 'float64'"):
        TrainerSettings(dtype="float64")  # type: ignore[arg-type]


def test_the_rate_rises_linearly_and_stays() -> None:
    settings = TrainerSettings(lr=8e-6, lr_warmup_steps=4)
    assert [learning_rate(settings, step) for step in range(1, 7)] == [2e-6, 4e-6, 6e-6, 8e-6, 8e-6, 8e-6]


def test_without_warm_up_the_first_step_has_the_full_rate() -> None:
    assert learning_rate(TrainerSettings(lr=3e-4, lr_warmup_steps=0), 1) == 3e-4


def test_a_record_holds_json_values_only() -> None:
    stats = StepStats(
        step=2, loss=float("nan"), grad_norm=float("inf"), lr=1e-6, tokens=3, sequences=1, micro_batches=1, padding=0.0,
        skipped="why", metrics={"entropy": 1.5, "mismatch_kl_k3": float("inf")},
    )  # fmt: skip
    record = stats.as_record()
    assert (record["loss"], record["grad_norm"], record["mismatch_kl_k3"]) == (None, None, None)
    assert (record["entropy"], record["optimizer_step"], record["skipped"]) == (1.5, 2, "why")
