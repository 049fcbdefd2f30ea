"""The rate follows warm-up and schedule, against the formulas written out."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from services.common.spec.learner import CriticSpec, LearnerSpec, LrSchedule
from services.learner.training.schedule import learning_rate


def test_the_rate_rises_linearly_and_stays() -> None:
    spec = LearnerSpec(lr=8e-6, lr_warmup_steps=4)
    assert [learning_rate(spec, step, 6) for step in range(1, 7)] == [2e-6, 4e-6, 6e-6, 8e-6, 8e-6, 8e-6]


def test_without_warm_up_the_first_step_has_the_full_rate() -> None:
    assert learning_rate(LearnerSpec(lr=3e-4, lr_warmup_steps=0), 1, 10) == 3e-4


def test_a_warm_up_by_share_is_of_the_jobs_steps() -> None:
    spec = CriticSpec(lr=1.0, lr_warmup_steps=7, lr_warmup_share=0.25)
    assert [learning_rate(spec, step, 16) for step in (1, 2, 4, 5)] == [0.25, 0.5, 1.0, 1.0]


@pytest.mark.parametrize("schedule", [LrSchedule.LINEAR, LrSchedule.COSINE])
def test_a_falling_rate_goes_from_the_full_one_at_the_warm_ups_end_to_the_least_at_the_last_step(
    schedule: LrSchedule,
) -> None:
    spec = LearnerSpec(lr=2e-4, lr_warmup_steps=10, lr_schedule=schedule, lr_min_ratio=0.1)
    rates = [learning_rate(spec, step, 110) for step in range(10, 111)]
    assert rates[0] == 2e-4
    assert rates[-1] == pytest.approx(2e-5)
    assert all(a > b for a, b in pairwise(rates))
    for passed, rate in enumerate(rates):
        left = 1 - passed / 100 if schedule is LrSchedule.LINEAR else (1 + math.cos(math.pi * passed / 100)) / 2
        assert rate == pytest.approx(2e-5 + 1.8e-4 * left, rel=1e-12)
    assert learning_rate(spec, 200, 110) == pytest.approx(2e-5), "a job that goes on keeps the least"
