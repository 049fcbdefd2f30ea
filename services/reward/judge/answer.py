"""Answer of a judge: its score, read strictly. What states no score, or several, is no verdict."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from services.common.errors import VerifierError
from services.common.spec.scorers import AnswerFormat, JudgeSpec

MAX_SCORE = 1e9
"""No scale goes so far; an integer may be too long for a float."""

_NUMBER = r"[-+]?(?:\d{1,15}(?:\.\d{0,15})?|\.\d{1,15})"
_BRACKETS = re.compile(r"\[\[\s*(" + _NUMBER + r")\s*\]\]")
_FENCE = re.compile(r"\A```(?:json)?[ \t]*\n(.*)\n```\Z", re.DOTALL)
_THOUGHTS = re.compile(r"\A\s*<think>.*?</think>", re.DOTALL)


class UnreadableAnswer(VerifierError):  # noqa: N818  an event
    """A judge's answer has no score of its scale, or several."""


@dataclass(frozen=True, slots=True)
class Grade:
    """Score of a judge and what it means. Example: Grade(score=7.0, reward=0.667, accuracy=1.0) of the scale 1 to 10."""

    score: float
    reward: float
    """0..1."""
    accuracy: float
    """0..1."""


def read_grade(answer: str, spec: JudgeSpec) -> Grade:
    """The grade in an answer; thoughts before it, in `<think>`, do not count. Raises UnreadableAnswer."""
    said = _THOUGHTS.sub("", answer, count=1).strip()
    score = _bracketed(said) if spec.answer is AnswerFormat.BRACKETS else _from_json(said)
    if not spec.lowest <= score <= spec.highest:
        raise UnreadableAnswer(f"the score {score:g} is not within {spec.lowest:g} to {spec.highest:g}")
    reward = (score - spec.lowest) / (spec.highest - spec.lowest)
    accuracy = reward if spec.accuracy_from is None else float(score >= spec.accuracy_from)
    return Grade(score, reward, accuracy)


def _bracketed(answer: str) -> float:
    scores = {float(text) for text in _BRACKETS.findall(answer)}
    if len(scores) != 1:
        found = (
            "no [[score]]"
            if not scores
            else f"several scores ({', '.join(f'{score:g}' for score in sorted(scores)[:5])})"
        )
        raise UnreadableAnswer(f"the answer has {found}")
    return scores.pop()


def _from_json(answer: str) -> float:
    fenced = _FENCE.match(answer)
    try:
        document = json.loads(fenced[1] if fenced else answer)
    except (ValueError, RecursionError) as error:
        raise UnreadableAnswer("the answer is not JSON") from error
    score = document.get("score") if isinstance(document, dict) else None
    if isinstance(score, bool) or not isinstance(score, int | float) or not abs(score) <= MAX_SCORE:
        raise UnreadableAnswer("the answer's JSON has no number `score`")
    return float(score)
