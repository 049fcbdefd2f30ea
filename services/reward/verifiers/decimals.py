"""Decimals as people write them: signs, thousands commas, currency."""

from __future__ import annotations

import re
from collections import deque
from decimal import Decimal

_NUMBER = re.compile(
    r"""
    (?P<sign> (?<![\w.)%]) [-+] (?=[$€£]?[ ]?\.?\d) )?    # a sign, unless it is the minus of `7-2` or `7 - 2`
    (?: [$€£] [ ]? )?
    (?P<digits> (?<!\d) \d{1,3} (?: ,\d{3} )+ (?!\d) (?: \.\d+ )? | \d+ (?: \.\d+ )? | (?<![\d.]) \.\d+ )
    """,
    re.VERBOSE,
)

_MINUS_SIGNS = str.maketrans({"−": "-", "–": "-", "﹣": "-", "－": "-"})


def first_number(text: str) -> Decimal | None:
    """The first number in the text, or None."""
    match = _NUMBER.search(text.translate(_MINUS_SIGNS))
    return _value(match) if match else None


def last_number(text: str) -> Decimal | None:
    """The last number in the text, or None."""
    matches = deque(_NUMBER.finditer(text.translate(_MINUS_SIGNS)), maxlen=1)
    return _value(matches[0]) if matches else None


def whole_number(text: str) -> Decimal | None:
    """The number that fills the whole text, or None."""
    match = _NUMBER.fullmatch(text.strip().translate(_MINUS_SIGNS))
    return _value(match) if match else None


def _value(match: re.Match[str]) -> Decimal:
    sign = "-" if (match["sign"] or "").startswith("-") else ""
    # Made from text, so exact at any length; arithmetic would round.
    return Decimal(sign + match["digits"].replace(",", ""))
