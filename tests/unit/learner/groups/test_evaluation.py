"""avg@k and pass@k count what was judged, and say what was not."""

from __future__ import annotations

import json
import time
from fractions import Fraction
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.learner.groups.buffer import Judged
from services.learner.groups.evaluation import EvalRound
from tests.unit.learner.scored_groups import judged_group, over_limit


def a_round(tasks: int = 3, first_id: int = 30, seconds: float = 60.0) -> EvalRound:
    return EvalRound(step=10, first_id=first_id, tasks=tasks, samples=4, deadline=time.monotonic() + seconds)


def test_the_figures_are_those_worked_out_by_hand() -> None:
    evaluation, answers = a_round(), dict[int, Judged]()
    answers[30] = judged_group(30, [1.0, 0.0, 0.0, 0.0], versions=(10, 11))
    answers[31] = judged_group(31, [0.0, 0.0, 0.0, 0.0], versions=(12,))
    answers[32] = judged_group(32, [1.0, 1.0, 1.0, 1.0], versions=(11,))
    assert evaluation.done(answers)
    result = evaluation.result(answers)
    assert result["avg_at_k"] == pytest.approx(5 / 12)
    assert result["pass_at_k"] == pytest.approx(2 / 3)
    assert result["pass_at_k_se"] == pytest.approx(1 / 3)
    assert (result["step"], result["k"], result["tasks"], result["unanswered"]) == (10, 4, 3, 0)
    assert (result["min_policy_version"], result["max_policy_version"]) == (10, 12)
    json.dumps(result, allow_nan=False)


@given(st.lists(st.lists(st.sampled_from([None, 0.0, 0.25, 1.0]), min_size=1, max_size=4), min_size=1, max_size=6))
def test_the_figure_is_the_mean_of_the_tasks_means_over_what_was_judged(groups: list[list[float | None]]) -> None:
    evaluation, answers = a_round(tasks=len(groups)), dict[int, Judged]()
    for place, accuracies in enumerate(groups):
        answers[30 + place] = judged_group(30 + place, accuracies)
    judged = [[a for a in accuracies if a is not None] for accuracies in groups]
    judged = [accuracies for accuracies in judged if accuracies]
    result = evaluation.result(answers)
    assert result["tasks"] == len(judged)
    assert result["unanswered"] == len(groups) - len(judged)
    count = sum(map(len, judged))
    assert (result["rollouts_judged"], result["rollouts_not_judged"]) == (count, 4 * len(groups) - count)
    if not judged:
        assert result["avg_at_k"] is None
        assert result["pass_at_k"] is None
        return
    means = [sum(map(Fraction, accuracies)) / len(accuracies) for accuracies in judged]
    assert result["avg_at_k"] == pytest.approx(float(sum(means) / len(means)))
    assert result["pass_at_k"] == pytest.approx(fmean(1.0 in accuracies for accuracies in judged))


def test_a_task_with_few_verdicts_weighs_as_much_as_any() -> None:
    evaluation, answers = a_round(tasks=2), dict[int, Judged]()
    answers[30] = judged_group(30, [1.0, None, None, None])
    answers[31] = judged_group(31, [0.0, 0.0, 0.0, 0.0])
    result = evaluation.result(answers)
    assert result["avg_at_k"] == 0.5
    assert (result["rollouts_judged"], result["rollouts_not_judged"]) == (5, 3)


def test_a_check_beyond_its_limit_is_a_wrong_answer_and_counted_as_such() -> None:
    evaluation, answers = a_round(tasks=3), dict[int, Judged]()
    answers[30] = over_limit(judged_group(30, [1.0, 1.0, 1.0, None]), reward=-1.0)
    answers[31] = judged_group(31, [1.0, 1.0, 1.0, None])
    result = evaluation.result(answers)
    assert result["avg_at_k"] == pytest.approx((0.75 + 1.0) / 2)
    assert (result["rollouts_judged"], result["rollouts_not_judged"], result["checks_over_limit"]) == (7, 5, 1)


def test_accuracy_counts_not_the_reward() -> None:
    evaluation, answers = a_round(tasks=1), dict[int, Judged]()
    answers[30] = judged_group(30, [-1.0, -1.0], accuracies=[1.0, 0.0])
    assert evaluation.result(answers)["avg_at_k"] == 0.5
    assert evaluation.result(answers)["pass_at_k"] == 1.0


@pytest.mark.parametrize("group_id", [0, 29, 33, 60])
def test_an_answer_of_another_round_is_ignored(group_id: int) -> None:
    evaluation, answers = a_round(), dict[int, Judged]()
    answers[group_id] = judged_group(group_id, [1.0, 1.0])
    assert evaluation.result(answers)["unanswered"] == 3


def test_a_failed_group_ends_the_wait_but_is_no_wrong_answer() -> None:
    evaluation, answers = a_round(tasks=2), dict[int, Judged]()
    answers[30] = judged_group(30, [1.0, 0.0])
    before = evaluation.done(answers)
    answers[31] = judged_group(31, [], failure="the prompt is too long")
    assert (before, evaluation.done(answers)) == (False, True)
    assert evaluation.result(answers)["avg_at_k"] == 0.5
    assert evaluation.result(answers)["unanswered"] == 1


def test_the_deadline_ends_a_round_with_what_it_has() -> None:
    assert not a_round(seconds=60.0).done({})
    late = a_round(seconds=-0.001)
    assert late.done({})
    result = late.result({})
    assert (result["tasks"], result["unanswered"], result["avg_at_k"], result["min_policy_version"]) == (
        0,
        3,
        None,
        None,
    )
