"""A judge's request: placeholders are replaced once, as text, and within bounds."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from services.common.spec.scorers import AnswerFormat, JudgeSpec
from services.common.streams.types import Message
from services.reward.judge.template import MAX_QUESTION_CHARS, request_text

PROMPT = (Message("user", "6 × 7 ="),)


def test_every_placeholder_is_replaced_and_nothing_else() -> None:
    template = '{question}|{response}|{reference}|{lowest}|{highest}|{"score": n}|\\boxed{answer}|{0}|%s|$x'
    spec = JudgeSpec(endpoint="e", template=template, lowest=0.0, highest=2.5)
    assert request_text(spec, PROMPT, "42", "43") == '6 × 7 =|42|43|0|2.5|{"score": n}|\\boxed{answer}|{0}|%s|$x'


def test_what_is_put_in_is_not_replaced_again_nor_evaluated() -> None:
    spec = JudgeSpec(endpoint="e", template="{question} {response}")
    attack = "{reference} {response.__class__} {response!r} {{lowest}}"
    assert request_text(spec, (Message("user", "{response}"),), attack, "secret") == "{response} " + attack


@pytest.mark.parametrize("answer", list(AnswerFormat))
def test_the_default_shows_question_reference_response_and_scale(answer: AnswerFormat) -> None:
    text = request_text(JudgeSpec(endpoint="e", answer=answer), PROMPT, "forty-two", "the reference")
    assert all(words in text for words in ("6 × 7 =", "forty-two", "the reference", "from 1 (worst) to 10 (best)"))
    assert ("[[" in text or "square brackets" in text) is (answer is AnswerFormat.BRACKETS)


def test_several_messages_are_shown_with_their_roles() -> None:
    spec = JudgeSpec(endpoint="e", template="{question}\n{response}")
    prompt = (Message("system", "Be brief."), Message("user", "6 × 7 ="))
    assert request_text(spec, prompt, "42", "") == "system: Be brief.\n\nuser: 6 × 7 =\n42"


def test_a_request_is_bounded_and_valid_utf8() -> None:
    spec = JudgeSpec(endpoint="e", template="{question}{response}")
    text = request_text(spec, (Message("user", "x" * 10**6 + "end"),), "\ud800", "")
    assert len(text) == MAX_QUESTION_CHARS + 1
    assert text.encode().endswith(b"end?")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"template": "{reponse} {response}"}, r"has \{reponse\}, and knows \{question\}"),
        ({"template": "Grade this."}, r"has no \{response\}"),
        ({"lowest": 5.0, "highest": 5.0}, "5 is not above lowest"),
        ({"accuracy_from": 11.0}, "11 is not above lowest"),
        ({"endpoint": "http://elsewhere"}, "endpoint"),
        ({"url": "http://elsewhere"}, "url"),
    ],
)
def test_a_section_that_cannot_be_meant_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        JudgeSpec.model_validate({"endpoint": "e"} | changes)
