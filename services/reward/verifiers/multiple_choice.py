r"""Multiple choice: the response names the right option. Reward 1 or 0.

The answer is what the response marks as its answer (`<answer>…</answer>`, `\boxed{…}`, `Answer: …`, `the answer is …`); else its last
`option B` or `(B)`; else its last line, where that is `B` or `B. …` and no other line is such; else the one option whose text the last line
has. A letter counts, in parentheses or with a point after it, and so does the option's text.

The row's extra_info may have the options, as `choices` or `options`: a list of texts (A, B, …), `{"A": text, …}`, or `{"label": [...],
"text": [...]}`. The reference is a letter, an option's text, or an option's place from 0. Without options it is a letter.
"""

from __future__ import annotations

import re
from string import ascii_uppercase
from typing import Any

from services.common.errors import VerifierError
from services.reward.verifiers.answers import normalised, stated
from services.reward.verifiers.base import Score, right_or_wrong
from services.reward.verifiers.dapo_math import unwrapped

Options = dict[str, str]
"""Label → text; the text is empty where the row does not have it."""

_NAMED = re.compile(r"\b(?:option|choice)\s+\(?([A-Za-z0-9])\)?(?!\w)", re.IGNORECASE)
_IN_PARENTHESES = re.compile(r"\(([A-Z0-9])\)")
_LEADING = re.compile(r"[\s$*(\[{\"']*([A-Za-z0-9])(?:[)\].:,$*}\"']|\s+[-–—(]|\s*$|\s+(?:because|since|as|is)\b)")
_BARE = re.compile(r"[\s$*(\[{\"'.:]*([A-Za-z0-9])[\s$*)\]}\"'.:]*")
_LISTED = re.compile(r"[\s*(\[]*([A-Z0-9])[.):\]]\s*\S")


def verify(response: str, ground_truth: str, extra_info: dict[str, Any]) -> Score:
    """Compares the option that the response names with the reference. Raises VerifierError when the row's options or reference are none."""
    options = options_of(extra_info)
    right = _reference(ground_truth, options)
    found = chosen(response, options)
    return right_or_wrong(found == right, found, right)


def options_of(extra_info: dict[str, Any]) -> Options:
    """The row's options; without any, the letters with empty texts. Raises VerifierError for another form."""
    given = extra_info.get("choices", extra_info.get("options"))
    match given:
        case None:
            return dict.fromkeys(ascii_uppercase, "")
        case {"label": [*labels], "text": [*texts]} if len(labels) == len(texts):
            pairs = list(zip(labels, texts, strict=True))
        case dict():
            pairs = list(given.items())
        case [*texts] if len(texts) <= len(ascii_uppercase):
            pairs = list(zip(ascii_uppercase, texts, strict=False))
        case _:
            pairs = []
    options = {str(label).strip().upper(): text for label, text in pairs}
    if not options or not all(len(label) == 1 and isinstance(text, str) for label, text in options.items()):
        raise VerifierError("extra_info.choices must be texts, in a list, or by a label of one letter or digit")
    return options


def chosen(response: str, options: Options) -> str | None:
    """The label of the option that a response names, or None."""
    answer = stated(response)
    if answer is not None and (label := _label(unwrapped(answer), options)) is not None:
        return label
    text = response.replace("**", "")
    for pattern in (_NAMED, _IN_PARENTHESES):
        named = [label for found in pattern.findall(text) if (label := str(found).upper()) in options]
        if named:
            return named[-1]
    return _last_line(text, options)


def _label(answer: str, options: Options) -> str | None:
    """The option that a marked answer names: by its text, or by its letter."""
    plain = normalised(answer)
    same = [label for label, text in options.items() if text and normalised(text) == plain]
    if len(same) == 1:
        return same[0]
    for match in (_BARE.fullmatch(answer), _LEADING.match(answer)):
        if match is not None and (label := match[1].upper()) in options:
            return label
    begun = [label for label, text in options.items() if text and plain.startswith(normalised(text))]
    return begun[0] if len(begun) == 1 else None


def _last_line(text: str, options: Options) -> str | None:
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        return None
    if (bare := _BARE.fullmatch(lines[-1])) is not None and bare[1].upper() in options:
        return bare[1].upper()
    listed = {match[1] for line in lines if (match := _LISTED.match(line)) is not None}
    if len(listed) == 1 and _LISTED.match(lines[-1]) and (label := listed.pop()) in options:
        return label
    last = normalised(lines[-1])
    within = [label for label, option in options.items() if option and normalised(option) in last]
    return within[0] if len(within) == 1 else None


def _reference(ground_truth: str, options: Options) -> str:
    plain = ground_truth.strip()
    same = [label for label, text in options.items() if text and normalised(text) == normalised(plain)]
    if len(same) == 1:
        return same[0]
    label = plain.strip("() .").upper()
    if label in options:
        return label
    if plain.isdecimal() and any(options.values()) and int(plain) < len(options):
        return [*options][int(plain)]
    raise VerifierError(f"ground_truth {ground_truth[:80]!r} is neither an option's letter nor its text")
