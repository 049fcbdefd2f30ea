"""Each verifier against right, wrong and odd answers."""

from __future__ import annotations

import json
from decimal import Decimal
from functools import cache
from typing import Any

import pytest
import reasoning_gym

from services.common.config.verifiers import BuiltIn
from services.common.errors import VerifierError
from services.reward.verifiers import dapo_math, gsm8k, mathematics, procedural
from services.reward.verifiers.base import Score, load
from services.reward.verifiers.dapo_math import last_boxed
from services.reward.verifiers.decimals import first_number, last_number, whole_number

RIGHT_GSM8K = [
    ("#### 42", "42"),
    ("She has 3 bags of 14 sweets.\n#### 42", "42"),
    ("#### $1,250.00", "1250"),
    ("####1250", "1,250"),
    ("#### −7", "-7"),
    ("#### 0.50", ".5"),
    ("#### 18 dollars, that is 3 more than 15", "18"),
    ("First I said #### 3 but it is #### 4", "4"),
    ("The total is $18.", "18"),
    ("It costs 1,000,000 in all", "1000000"),
    ("so x = -5", "-5"),
    ("30 % of 60 is 18%", "18"),
    ("12 apples", "Ann has 5 + 7 = <<5+7=12>>12 apples.\n#### 12"),
    ("#### 007", "7"),
    (r"so \boxed{18}. I checked it 2 times", "18"),
    (r"so \boxed{\$1,250}, and not 3", "1250"),
    (r"so \boxed{many}, or 18", "18"),
    ("#### " + "9" * 60, "9" * 60),
]
WRONG_GSM8K = [
    ("#### 41", "42"),
    ("42 is what one might think, but\n#### 24", "42"),
    ("the answer is 42 and not 43", "42"),
    ("", "42"),
    ("forty-two", "42"),
    ("####", "42"),
    ("42 is before the mark: #### forty-two", "42"),
    ("42 ####", "42"),
    ("10-5", "-5"),
    ("#### " + "9" * 59 + "8", "9" * 60),
    ("#### 4.2", "42"),
    ("#### -42", "42"),
    (r"\boxed{42}, no: #### 41", "42"),
    (r"\boxed{42}, no: \boxed{41}", "42"),
]


@pytest.mark.parametrize(("response", "reference"), RIGHT_GSM8K)
def test_gsm8k_right(response: str, reference: str) -> None:
    assert gsm8k.verify(response, reference, {}).reward == 1.0


@pytest.mark.parametrize(("response", "reference"), WRONG_GSM8K)
def test_gsm8k_wrong(response: str, reference: str) -> None:
    score = gsm8k.verify(response, reference, {})
    assert (score.reward, score.accuracy) == (0.0, 0.0)


def test_gsm8k_tells_what_it_compared() -> None:
    assert gsm8k.verify("#### 41", "42", {}).detail == "41 is not 42"
    assert gsm8k.verify("I do not know", "42", {}).detail == "no answer found"


def test_a_reference_without_a_number_is_no_wrong_answer() -> None:
    with pytest.raises(VerifierError, match="ground_truth 'many' holds no number"):
        gsm8k.verify("#### 42", "many", {})


@pytest.mark.parametrize(
    ("text", "first", "last"),
    [
        ("", None, None), ("none", None, None), ("7", "7", "7"), ("7-2", "7", "2"), ("7 - 2", "7", "2"), ("-7+-2", "-7", "-2"),
        ("1,2,3", "1", "3"), ("1,234,5", "1234", "5"), ("12,345.60", "12345.60", "12345.60"), ("€3.20 or $-4", "3.20", "-4"),
        ("-$3", "-3", "-3"), ("v1.2.3", "1.2", "3"), ("x2", "2", "2"), ("½ and 0.5", "0.5", "0.5"), (".5", "0.5", "0.5"), ("3.", "3", "3"),
    ],
)  # fmt: skip
def test_numbers_are_read_as_people_write_them(text: str, first: str | None, last: str | None) -> None:
    assert first_number(text) == (None if first is None else Decimal(first))
    assert last_number(text) == (None if last is None else Decimal(last))


@pytest.mark.parametrize(
    ("text", "value"), [("5", "5"), (" -1,000 ", "-1000"), ("5 apples", None), ("", None), ("1/2", None), ("5-3", None)]
)
def test_a_whole_number_is_nothing_but_a_number(text: str, value: str | None) -> None:
    assert whole_number(text) == (None if value is None else Decimal(value))


RIGHT_DAPO = [
    ("I add.\nAnswer: 42", "42"),
    ("answer:42", "42"),
    ("Answer: $42$", "42"),
    (r"Answer: \boxed{42}", "42"),
    ("Answer: 12,345", "12345"),
    ("Answer: x = 5", "5"),
    (r"Answer: $\frac12$", r"\frac{1}{2}"),
    (r"Answer: \sqrt2", r"\sqrt{2}"),
    ("Answer: 5 cm", "5"),
    (r"Answer: \text{Monday}", "Monday"),
    (r"Answer: 90^\circ", "90"),
    ("Answer: 3\nNo, wait.\nAnswer: 4", "4"),
    ("Answer:\n17", "17"),
    ("Answer: 42\nI am sure of it.", "42"),
    (r"Therefore the sum is \boxed{42}.", "42"),
    ("x" * 5000 + "Answer: 42", "42"),
]
WRONG_DAPO = [
    ("Answer: 41", "42"),
    ("42", "42"),
    ("", "42"),
    ("The answer is 42", "42"),
    ("Answer: 42" + " I explain at length." * 20, "42"),
    ("Answer: 42\nAnswer: 43", "42"),
    ("Answer: 42 or 43", "42"),
    ("Answer: 0.5", r"\frac{1}{2}"),
    (r"Answer: 41, while \boxed{42}", "42"),
]


@pytest.mark.parametrize(("response", "reference"), RIGHT_DAPO)
def test_dapo_right(response: str, reference: str) -> None:
    score = dapo_math.verify(response, reference, {})
    assert (score.reward, score.accuracy) == (1.0, 1.0)


@pytest.mark.parametrize(("response", "reference"), WRONG_DAPO)
def test_dapo_wrong(response: str, reference: str) -> None:
    score = dapo_math.verify(response, reference, {})
    assert (score.reward, score.accuracy) == (-1.0, 0.0)


@pytest.mark.parametrize(
    ("text", "inner"),
    [
        (r"\boxed{1} \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1", None),
        ("1", None),
        (r"\boxed{}", ""),
    ],
)
def test_the_last_box_counts(text: str, inner: str | None) -> None:
    assert last_boxed(text) == inner


RIGHT_MATH = [
    (r"so the answer is \boxed{\frac{1}{2}}", "0.5"),
    (r"\boxed{0.5}", r"\frac{1}{2}"),
    (r"\boxed{x^2+2x+1}", "(x+1)^2"),
    (r"$\sqrt{8}$", r"2\sqrt{2}"),
    ("The answer is 42.", "42"),
    ("the total comes to 1,234", "1234"),
    (r"\boxed{\{3, 1, 2\}}", r"\{1, 2, 3\}"),
    (r"\boxed{(1, 2)}", "(1,2)"),
    (r"$x = 7$", "7"),
    (r"\boxed{\text{B}}", r"\text{B}"),
    (r"I guess 5, no: \boxed{6}", "6"),
    (r"\boxed{50\%}", r"50\%"),
    (r"\boxed{[0, 1)}", "[0,1)"),
    (r"\boxed{7}", "$7$"),
    (r"\boxed{7}", r"We find \boxed{7}."),
]
WRONG_MATH = [
    (r"\boxed{\frac{1}{3}}", "0.5"),
    (r"\boxed{(2, 1)}", "(1,2)"),
    (r"\boxed{x^2+2x}", "(x+1)^2"),
    ("", "42"),
    ("no idea", "42"),
    (r"\boxed{}", "42"),
    (r"\boxed{\frac{1}{", "0.5"),
    (r"\boxed{42} but then \boxed{43}", "42"),
    (r"\boxed{__import__('os').getpid()}", "42"),
    ("$$$$ {{{ \\\\ }}}", "42"),
    (r"\boxed{\infty}", "42"),
    (r"\boxed{\frac{1}{0}}", "42"),
]


@pytest.mark.parametrize(("response", "reference"), RIGHT_MATH)
def test_math_right(response: str, reference: str) -> None:
    assert mathematics.verify(response, reference, {}).reward == 1.0


@pytest.mark.parametrize(("response", "reference"), WRONG_MATH)
def test_math_wrong(response: str, reference: str) -> None:
    score = mathematics.verify(response, reference, {})
    assert (score.reward, score.accuracy) == (0.0, 0.0)


@pytest.mark.parametrize("reference", ["", "   "])
def test_an_empty_reference_is_no_wrong_answer(reference: str) -> None:
    with pytest.raises(VerifierError, match="cannot be parsed"):
        mathematics.verify(r"\boxed{1}", reference, {})


def over_the_wire(value: Any) -> Any:
    """What becomes of JSON values between the learner and the verifier: sequences arrive as tuples."""
    if isinstance(value, list):
        return tuple(over_the_wire(item) for item in value)
    return {key: over_the_wire(item) for key, item in value.items()} if isinstance(value, dict) else value


@cache
def generator(task: str, config: str) -> Any:
    return reasoning_gym.create_dataset(task, size=5, seed=11, **json.loads(config))


def row(task: str, index: int = 0, **config: Any) -> tuple[str, dict[str, Any]]:
    """The reference and the extra_info of a procedural row, as a verifier gets them."""
    entry = generator(task, json.dumps(config))[index]
    carried = json.loads(json.dumps({"entry": entry, "config": config}, default=str))
    return entry["answer"], {**over_the_wire(carried), "data_source": f"reasoning_gym:{task}"}


TASKS = {
    "chain_sum": {"min_terms": 2, "max_terms": 2},
    "gsm_symbolic": {},
    "countdown": {},
    "spell_backward": {},
    "letter_counting": {},
    "mini_sudoku": {},
    "number_sorting": {},
    "arc_agi": {},
    "rearc": {},
}
STYLES = [
    "{}",
    "<answer>{}</answer>",
    "Let me think: 1, 2, 3.\n<answer> {} </answer> I hope.",
    "<answer>wrong</answer> No: <answer>{}</answer>",
]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("task", TASKS)
def test_a_tasks_own_answer_is_right(task: str, style: str) -> None:
    for index in range(3):
        reference, extra_info = row(task, index, **TASKS[task])
        score = procedural.verify(style.format(reference), reference, extra_info)
        assert (score.reward, score.accuracy) == (1.0, 1.0), score.detail


@pytest.mark.parametrize("task", TASKS)
def test_a_changed_answer_is_not_right(task: str) -> None:
    for index in range(3):
        reference, extra_info = row(task, index, **TASKS[task])
        digits = {"0": "8", "1": "9", "2": "7", "3": "9", "4": "1", "5": "9", "6": "1", "7": "2", "8": "3", "9": "4"}
        changed = "".join(digits.get(char, char) for char in reference)
        changed = changed if changed != reference else reference[::-1] + "q"
        for response in (changed, f"<answer>{changed}</answer>", "", "no idea"):
            score = procedural.verify(response, reference, extra_info)
            assert score.accuracy == 0.0, (response, score.detail)
            assert 0.0 <= score.reward < 0.999


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("The sum of 2 and 3 is 5.", "5"), ("5", "5"), ("2 + 3 = 5\n", "5"), ("-5", "-5"), ("= -5", "-5"), ("it is 1,005", "1005"),
        ("<answer>five</answer>", "five"), ("no number", "no number"), ("<answer>7", "7"), ("<answer>\n7\n</answer>", "7"),
    ],
)  # fmt: skip
def test_of_a_numeric_task_the_last_number_is_the_answer(response: str, answer: str) -> None:
    assert procedural.answer_text(response, "12") == answer


def test_of_another_task_the_whole_response_is_the_answer() -> None:
    assert procedural.answer_text("  3 * (4 + 5)\n", "(5 + 4) * 3") == "3 * (4 + 5)"


@pytest.mark.parametrize(
    ("extra_info", "message"),
    [
        ({}, "extra_info.entry is missing"),
        ({"entry": "5"}, "extra_info.entry is missing"),
        ({"entry": {"answer": "5", "metadata": {}}}, "no task None"),
        ({"entry": {"answer": "5", "metadata": {"source_dataset": "no_such"}}}, "no task 'no_such'"),
        ({"entry": {"answer": "5", "metadata": {}}, "data_source": "reasoning_gym:nope"}, "no task 'nope'"),
    ],
)
def test_a_row_without_its_task_is_no_wrong_answer(extra_info: dict[str, Any], message: str) -> None:
    with pytest.raises(VerifierError, match=message):
        procedural.verify("5", "5", extra_info)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 42\n####", "42"), ("#### 42\n#### \n####", "42"), ("#### 41 #### 42 #### that is all", "42"), ("#### 42", "42"),
        ("41\n####", None), ("#### ", None), ("it is 7", "7"),
    ],
)  # fmt: skip
def test_of_several_marks_the_last_that_a_number_follows_counts(text: str, number: str | None) -> None:
    assert gsm8k.final_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (r"\text{x_{1}}", "x_{1}"), (r"\textbf{\text{B}}", "B"), (r"\overline{\text{AB}}", "AB"), (r"\text{\textbf{\overline{Q}}}", "Q"),
        (r"\frac{\text{a}}{\text{b_{2}}}", r"\frac{a}{b_{2}}"), (r"\text{never closed", r"\text{neverclosed"), (r"x}\text{y}", "x}y"),
        (r"\text{" * 50 + "deep" + "}" * 50, "deep"), (r"\text{" * 50 + "deep" + "}" * 49, r"\text{deep"), (r"\mbox{\text{C}}", "C"),
    ],
)  # fmt: skip
def test_decoration_goes_however_its_braces_are_nested(written: str, meant: str) -> None:
    assert dapo_math.normalise(written) == meant
    assert dapo_math.verify(f"Answer: ${written}$", meant, {}).reward == (1.0 if len(written) < 200 else -1.0)


@pytest.mark.parametrize(
    ("reference", "right"),
    [
        (r"\$18.90", "18.90"), (r"\$32,\!348", "32348"), (r"\$32,\!348", r"\$32,\!348"), (r"$\$5$", "5"), ("$18.90", "18.90"),
        (r"\(x^2\)", "x^2"), (r"$x^2$", "x^2"), (r"so \boxed{\$7}", "7"),
    ],
)  # fmt: skip
def test_a_reference_in_dollars_is_no_formula_that_was_never_closed(reference: str, right: str) -> None:
    assert mathematics.verify(rf"It is \boxed{{{right}}}.", reference, {}).accuracy == 1.0
    assert mathematics.verify(r"It is \boxed{17}.", reference, {}).accuracy == 0.0


@pytest.mark.parametrize("name", BuiltIn)
def test_every_built_in_name_has_its_verifier(name: BuiltIn) -> None:
    assert callable(load(name))


@pytest.mark.parametrize(
    ("reward", "accuracy"), [(float("nan"), 1.0), (float("inf"), 1.0), (1.0, 1.01), (1.0, -0.1), (0.0, float("nan"))]
)
def test_a_score_is_finite_and_its_accuracy_a_share(reward: float, accuracy: float) -> None:
    with pytest.raises(VerifierError):
        Score(reward, accuracy)
