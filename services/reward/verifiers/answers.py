r"""Answers within responses: where models put them when they are prompted to, and texts that people would call the same."""

from __future__ import annotations

import re
import unicodedata
from typing import Any

from services.common.errors import VerifierError
from services.reward.verifiers.dapo_math import last_boxed

_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_STATED = re.compile(r"\banswer(?:\s+is)?[ \t]*[:=][ \t]*([^\n]+)|\banswer\s+is[ \t]+([^\n]+)", re.IGNORECASE)
_SPACES = re.compile(r"\s+")
_OUTER = " \t\n.,;:!?\"'`*_“”‘’«»"


def tagged(response: str) -> str | None:
    """The content of the last `<answer>…</answer>`, stripped; None where there is none."""
    found = _TAGGED.findall(response)
    return str(found[-1]).strip() if found else None


def stated(response: str) -> str | None:
    r"""The answer that a response marks as such: its last `<answer>…</answer>`, else its last `\boxed{…}`, else its last `Answer: …`."""
    for answer in (tagged(response), last_boxed(response)):
        if answer is not None:
            return answer.strip()
    lines = _STATED.findall(response.replace("**", ""))
    return (lines[-1][0] or lines[-1][1]).strip() if lines else None


def normalised(text: str, *, case: bool = False) -> str:
    """The text in one form of Unicode (NFKC), with single spaces, without quotes and punctuation around it, and in one case."""
    plain = _SPACES.sub(" ", unicodedata.normalize("NFKC", text)).strip(_OUTER)
    return plain if case else plain.casefold()


def references(ground_truth: str, extra_info: dict[str, Any]) -> list[str]:
    """All right answers of a row: its ground truth, then those in extra_info `answers`. Raises VerifierError for another type, or none."""
    more = extra_info.get("answers", [])
    if not isinstance(more, list | tuple) or not all(isinstance(each, str) for each in more):
        raise VerifierError("extra_info.answers must be a list of texts: further right answers")
    found = [each for each in (ground_truth, *more) if each.strip()]
    if not found:
        raise VerifierError("ground_truth is empty, and extra_info.answers has no other right answer")
    return found
