from __future__ import annotations

import pytest

from services.common.data.record import TaskRecord
from services.common.data.references import FORMS, trial_group, trial_of
from services.common.streams.types import Message, Purpose, Verdict, VerdictStatus

RECORD = TaskRecord((Message("user", "6 · 7 ="),), "openai/gsm8k", "42", {"index": 3})


def verdict(right: bool, detail: str = "", verifier: str = "gsm8k") -> Verdict:
    return Verdict(VerdictStatus.SCORED, float(right), float(right), verifier, detail)


def test_each_form_and_the_response_are_rollouts_of_the_task() -> None:
    group = trial_group(3, RECORD, "perhaps 42", Purpose.EVAL)
    texts = [rollout.text for rollout in group.rollouts]
    assert texts == ["42", "Answer: 42", "\\boxed{42}", "#### 42", "<answer>42</answer>", "perhaps 42"]
    assert (group.task.purpose, group.task.group_id, group.task.prompt) == (Purpose.EVAL, 3, RECORD.prompt)
    assert (group.task.ground_truth, group.task.extra_info) == ("42", {"index": 3})


def test_a_reference_is_right_if_it_is_in_one_form() -> None:
    group = trial_group(3, RECORD, None, Purpose.TRAIN)
    trial = trial_of(group, [verdict(name == "#### …", "no answer found") for name in FORMS])
    assert (trial.right, trial.accepted, trial.detail, trial.response) == (True, ("#### …",), "", None)


def test_a_reference_that_no_form_makes_right_has_the_verifiers_words() -> None:
    group = trial_group(3, RECORD, "42", Purpose.TRAIN)
    trial = trial_of(group, [*(verdict(False, f"no: {name}") for name in FORMS), verdict(True)])
    assert (trial.right, trial.accepted, trial.detail) == (False, (), "no: alone")
    assert trial.response == verdict(True)


@pytest.mark.parametrize("right", [True, False])
def test_the_tests_of_a_program_are_no_response(right: bool) -> None:
    group = trial_group(3, RECORD, None, Purpose.TRAIN)
    assert trial_of(group, [verdict(right, verifier="code")] * len(FORMS)).right is None
