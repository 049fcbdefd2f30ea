"""Verifiers of texts, choices and forms, against right, wrong and odd responses. They need no package of mathematics."""

from __future__ import annotations

import time
from typing import Any

import pytest

from services.common.errors import VerifierError
from services.reward.verifiers import exact_match, multiple_choice
from services.reward.verifiers import format as form
from services.reward.verifiers.answers import normalised, stated

TEXTS = ["a cat", "the red fox", "a dog", "none of the above"]
OPTIONS = {"choices": TEXTS}

NAMED_B = [
    "(B)", "B", "b", "B.", "B)", "**B**", "Answer: B", "answer: b", "**Answer:** (B)", "The answer is B.", "The answer is (b).",
    "The correct answer is: B", r"So we get \boxed{B}.", r"\boxed{\text{B}}", r"\boxed{(B)}", "<answer>B</answer>",
    "<answer> (B) </answer>",
    "<answer>the red fox</answer>", "Answer: The red fox.", "Answer: B. the red fox", "Answer: B) because it is red", "Answer: $B$",
    "Not (A), since cats do not bark, but (B)", "Therefore, option B is right.", "I choose option (b)", "It must be\n\nB",
    "It must be\nB. the red fox", "A cat is no fox.\nSo it is the red fox!", "Answer: A\nNo, wait.\nAnswer: B",
    "First <answer>A</answer>, then <answer>B</answer>", "Answer: B\n\nI am sure of it.", "Answer = B",
    "<answer>B: the red fox</answer>",
]  # fmt: skip
NOT_B = [
    "", "I do not know", "A", "(C)", "Answer: A", "The answer is a dog.", "<answer>D</answer>", r"\boxed{C}", "Answer: B\nAnswer: C",
    "A. a cat\nB. the red fox\nC. a dog\nD. none of the above", "A cat and the red fox", "Answer: E", "Answer: Bob",
    "(B) is tempting, but (C)",
    "Answer: AB", "BB", "Answer: ", "x" * 30_000,
]  # fmt: skip


@pytest.mark.parametrize("response", NAMED_B)
def test_an_option_is_named_in_every_usual_form(response: str) -> None:
    score = multiple_choice.verify(response, "B", OPTIONS)
    assert (score.reward, score.accuracy) == (1.0, 1.0), score.detail


@pytest.mark.parametrize("response", NOT_B)
def test_what_names_another_option_or_none_is_wrong(response: str) -> None:
    score = multiple_choice.verify(response, "B", OPTIONS)
    assert (score.reward, score.accuracy) == (0.0, 0.0), score.detail


@pytest.mark.parametrize("reference", ["B", "b", "(B)", "B.", "the red fox", "The Red Fox", "1"])
def test_the_reference_is_a_letter_a_text_or_a_place(reference: str) -> None:
    assert multiple_choice.verify("Answer: B", reference, OPTIONS).reward == 1.0
    assert multiple_choice.verify("Answer: C", reference, OPTIONS).reward == 0.0


@pytest.mark.parametrize(
    "options",
    [
        {"choices": {"label": ["A", "B"], "text": ["a cat", "the red fox"]}}, {"options": {"A": "a cat", "b": "the red fox"}},
        {"choices": ("a cat", "the red fox")}, {},
    ],
)  # fmt: skip
def test_options_come_in_the_forms_that_datasets_have(options: dict[str, Any]) -> None:
    assert multiple_choice.verify("(B)", "B", options).reward == 1.0


def test_labels_may_be_digits() -> None:
    options = {"choices": {"label": ["1", "2"], "text": ["a cat", "the red fox"]}}
    assert multiple_choice.verify("Answer: 2", "2", options).reward == 1.0
    assert multiple_choice.verify("the red fox", "2", options).reward == 1.0


@pytest.mark.parametrize(
    ("reference", "extra_info"),
    [("Z", OPTIONS), ("", OPTIONS), ("a bird", OPTIONS), ("9", OPTIONS), ("12", {}), ("A", {"choices": [1, 2]}), ("A", {"choices": "ab"}),
     ("A", {"choices": []}), ("A", {"choices": {"label": ["A"], "text": []}}), ("A", {"choices": {"long": "x"}})],
)  # fmt: skip
def test_a_row_that_is_none_is_no_wrong_answer(reference: str, extra_info: dict[str, Any]) -> None:
    with pytest.raises(VerifierError, match=r"ground_truth|extra_info\.choices"):
        multiple_choice.verify("A", reference, extra_info)


SAME = [
    ("Paris", "Paris"), ("paris.", "Paris"), ("  PARIS \n", "Paris"), ("Answer: Paris", "Paris"), ("<answer>Paris</answer>", "paris"),
    (r"It is \boxed{Paris}", "Paris"), ("The answer is Paris.", "Paris"), ("**Answer:** Paris", "Paris"), ("Answer: “Paris”", "Paris"),
    ("New \n  York", "new york"), ("ﬁn", "fin"), ("Answer: C++", "C++"), ("STRASSE", "straße"), ("Answer: x\nAnswer: Paris", "Paris"),
]  # fmt: skip
OTHER = [
    ("London", "Paris"),
    ("Paris, I think", "Paris"),
    ("", "Paris"),
    ("Answer: C", "C++"),
    ("Answer: Paris\nAnswer: London", "Paris"),
]


@pytest.mark.parametrize(("response", "reference"), SAME)
def test_texts_that_people_call_the_same_match(response: str, reference: str) -> None:
    assert exact_match.verify(response, reference, {}).reward == 1.0


@pytest.mark.parametrize(("response", "reference"), OTHER)
def test_other_texts_do_not(response: str, reference: str) -> None:
    score = exact_match.verify(response, reference, {})
    assert (score.reward, score.accuracy) == (0.0, 0.0)


def test_one_of_several_right_answers_is_enough() -> None:
    assert exact_match.verify("NYC", "New York", {"answers": ("NYC", "The Big Apple")}).reward == 1.0
    assert exact_match.verify("LA", "New York", {"answers": ["NYC"]}).reward == 0.0
    assert exact_match.verify("NYC", "", {"answers": ["NYC"]}).reward == 1.0


def test_case_counts_where_the_job_wants_it() -> None:
    assert exact_match.verify("paris", "Paris", {"exact_case": True}).reward == 0.0
    assert exact_match.verify("Paris", "Paris", {"exact_case": True}).reward == 1.0


@pytest.mark.parametrize(
    ("reference", "extra_info"), [("", {}), (" ", {}), ("x", {"answers": "y"}), ("x", {"answers": [1]})]
)
def test_without_a_right_answer_none_is_wrong(reference: str, extra_info: dict[str, Any]) -> None:
    with pytest.raises(VerifierError):
        exact_match.verify("x", reference, extra_info)


WELL_FORMED = "<think>6 × 7</think>\n<answer>42</answer>"
MALFORMED = [
    "", "42", "<answer>42</answer>", "<think>6 × 7</think>", "<answer>42</answer><think>6 × 7</think>", f"Well: {WELL_FORMED}",
    f"{WELL_FORMED} That is it.", f"{WELL_FORMED}{WELL_FORMED}", "<think></think><answer>42</answer>",
    "<think>6 × 7</think><answer> </answer>",
    "<think>6 × 7</think> so <answer>42</answer>", "<think>6 × 7<answer>42</answer></think>", "</think>6 × 7<think><answer>42</answer>",
]  # fmt: skip


def test_a_response_of_the_form_is_right() -> None:
    assert form.verify(f"  {WELL_FORMED}\n", "", {}).reward == 1.0


@pytest.mark.parametrize("response", MALFORMED)
def test_a_response_of_another_form_is_wrong_and_says_why(response: str) -> None:
    score = form.verify(response, "", {})
    assert (score.reward, score.accuracy) == (0.0, 0.0)
    assert score.detail


@pytest.mark.parametrize(
    ("extra_info", "response", "reward"),
    [
        ({"format_tags": ["plan", "code"]}, "<plan>a</plan><code>b</code>", 1.0),
        ({"format_tags": ("plan", "code")}, WELL_FORMED, 0.0),
        ({"format_boxed": True}, r"so \boxed{42}", 1.0),
        ({"format_boxed": True}, r"so \boxed{ }", 0.0),
        ({"format_boxed": True}, r"so \boxed{42", 0.0),
        ({"format_boxed": True, "format_tags": ["think"]}, r"<think>so \boxed{42}</think>", 1.0),
        ({"format_boxed": True, "format_tags": ["think"]}, r"so \boxed{42}", 0.0),
        ({"format_pattern": r"\d+ (apples|pears)"}, " 42 pears\n", 1.0),
        ({"format_pattern": r"\d+ (apples|pears)"}, "42 pears and more", 0.0),
        ({"format_pattern": r"a.*b"}, "a\n\nb", 1.0),
    ],
)
def test_the_form_is_the_jobs_or_the_rows(extra_info: dict[str, Any], response: str, reward: float) -> None:
    assert form.verify(response, "", extra_info).reward == reward


@pytest.mark.parametrize("extra_info", [{"format_tags": "think"}, {"format_tags": ["a b"]}, {"format_pattern": "("}])
def test_a_form_that_cannot_be_read_is_no_wrong_answer(extra_info: dict[str, Any]) -> None:
    with pytest.raises(VerifierError, match="format_"):
        form.verify("x", "", extra_info)


@pytest.mark.parametrize(
    "text",
    ["<answer>" * 4000, "answer: " * 4000, r"\boxed{" * 5000, "answer is " * 3000, "(A" * 16_000, "<think>" * 4000],
)
def test_the_longest_responses_take_no_time(text: str) -> None:
    began = time.perf_counter()
    stated(text)
    form.verify(text, "", {})
    multiple_choice.verify(text, "B", OPTIONS)
    exact_match.verify(text, "42", {})
    assert time.perf_counter() - began < 1.0


def test_an_empty_text_has_nothing_stated() -> None:
    assert stated("") is None
    assert normalised(" “ ” ") == ""
