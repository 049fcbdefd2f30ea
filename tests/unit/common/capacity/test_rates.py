"""Rates from step records."""

from __future__ import annotations

from typing import Any

import pytest

from services.common.capacity.rates import WARM_UP_STEPS, measure
from services.common.errors import ConfigError
from tests.unit.common.capacity.step_records import records


def test_rates_are_means_of_the_steps_after_the_warm_up() -> None:
    rates = measure(records(40))
    assert (rates.first_step, rates.last_step, rates.steps) == (WARM_UP_STEPS + 1, 40, 37)
    assert (rates.period_s, rates.learner_s) == pytest.approx((1.0, 0.4))
    assert (rates.accept_rate, rates.samples_per_group, rates.tokens_per_group) == pytest.approx((0.8, 8.0, 80.0))
    assert (rates.samples_per_s, rates.tokens_per_s) == pytest.approx((256.0, 3200.0))
    assert (rates.busy_share, rates.groups_at_once, rates.group_s) == pytest.approx((1.0, 24.0, 0.6))


def test_a_step_in_which_no_group_came_counts_too() -> None:
    run = records(40)
    empty = {"rollout_servers": 0, "rollout_busy_s": 0.0, "groups_sampled": 0, "generate_s_mean": None}
    rates = measure([step.model_copy(update=empty) if step.step % 2 else step for step in run])
    assert (rates.steps, rates.servers) == (37, 1)
    assert rates.busy_share == pytest.approx(19 / 37)


def test_both_laws_give_the_measured_seconds_of_a_group() -> None:
    rates = measure(records())
    for law in rates.laws(24):
        assert law.group_s(rates.groups_at_once, 1) == pytest.approx(rates.group_s)


def test_a_pause_and_a_step_trained_again_are_left_out() -> None:
    run = records(40)
    late = [step.model_copy(update={"at": step.at + 500.0}) if step.step > 20 else step for step in run]  # type: ignore[operator]
    assert measure(late).period_s == pytest.approx(1.0)
    again = [step.model_copy(update={"replayed": step.step == 20, "wait_s": 0.6 + (step.step == 20)}) for step in run]
    assert measure(again).learner_s == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ({"count": 10}, "needs 11 steps in a row"),
        ({"groups_sampled": None}, "an earlier release trained them"),
        ({"groups_trained": 0}, "no group was sampled"),
    ],
)
def test_what_no_rate_can_be_taken_from_is_said(run: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        measure(records(**run))
