"""Scores in answers of judges: read strictly, mapped to reward and accuracy."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.spec.scorers import AnswerFormat, JudgeSpec
from services.reward.judge.answer import UnreadableAnswer, read_grade

BRACKETS = JudgeSpec(endpoint="e", lowest=1.0, highest=10.0)
JSON = JudgeSpec(endpoint="e", lowest=0.0, highest=1.0, answer=AnswerFormat.JSON)


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("[[7]]", 7.0), ("Good, but terse.\n\nGrade: [[ 7.5 ]]", 7.5), ("[[7]] … and again [[7.0]]", 7.0), ("[[10.]]", 10.0),
        ("<think>Is it [[2]]? No.</think>\n[[9]]", 9.0), ("a[0] = [[3]]", 3.0),
    ],
)  # fmt: skip
def test_a_score_in_double_brackets_is_found_wherever_it_stands(answer: str, score: float) -> None:
    assert read_grade(answer, BRACKETS).score == score


@pytest.mark.parametrize(
    "answer",
    [
        "", "7", "[7]", "[[seven]]", "[[]]", "[[7]] or [[8]]", "[[11]]", "[[0]]", "[[-7]]", "[[nan]]", "[[1e1]]", "[[7/10]]",
        "<think>[[7]]</think>", "[[" + "9" * 400 + "]]",
    ],
)  # fmt: skip
def test_what_is_no_score_of_the_scale_or_several_is_unreadable(answer: str) -> None:
    with pytest.raises(UnreadableAnswer):
        read_grade(answer, BRACKETS)


@pytest.mark.parametrize(
    "answer",
    [
        '{"score": 0.5}',
        '{"why": "half", "score": 0.5}',
        '```json\n{"score": 0.5}\n```',
        '```\n{"score": 0.5}\n```',
        ' {"score": 0.5}\n',
    ],
)
def test_a_score_in_json_is_the_whole_answers(answer: str) -> None:
    assert read_grade(answer, JSON).score == 0.5


@pytest.mark.parametrize(
    "answer",
    [
        "0.5", '{"score": "0.5"}', '{"score": true}', '{"score": null}', '{"grade": 0.5}', '[{"score": 0.5}]', '{"score": NaN}',
        'Here: {"score": 0.5}', '{"score": 0.5} and more', '{"score": 0.5', '{"score": 2}', "[" * 100_000, '{"score": 1' + "0" * 400 + "}",
    ],
)  # fmt: skip
def test_json_without_a_number_of_the_scale_is_unreadable(answer: str) -> None:
    with pytest.raises(UnreadableAnswer):
        read_grade(answer, JSON)


@given(st.floats(1, 10), st.floats(1.5, 10))
def test_the_scale_becomes_0_to_1_and_a_threshold_the_accuracy(score: float, right: float) -> None:
    spec = BRACKETS.model_copy(update={"accuracy_from": right, "answer": AnswerFormat.JSON})
    grade = read_grade(json.dumps({"score": score}), spec)
    assert grade.reward == (score - 1) / 9
    assert grade.accuracy == (1.0 if score >= right else 0.0)
    assert (
        read_grade(json.dumps({"score": score}), spec.model_copy(update={"accuracy_from": None})).accuracy
        == grade.reward
    )


@given(st.text(max_size=300))
def test_any_text_is_a_grade_within_0_to_1_or_unreadable(answer: str) -> None:
    for spec in (BRACKETS, JSON):
        try:
            grade = read_grade(answer, spec)
        except UnreadableAnswer:
            continue
        assert 0 <= grade.reward <= 1
        assert 0 <= grade.accuracy <= 1
