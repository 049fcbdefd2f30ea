"""Mathematics, by symbolic comparison (the `math-verify` package). Reward 1 or 0.

It parses what the policy wrote with sympy, which evaluates: `9^9^9^9` runs for ever. So it has no time limits of its own here (they rest on
signals and cannot interrupt everything); the process it runs in is killed instead.
"""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any

from math_verify import parse
from math_verify import verify as equal

from services.common.errors import VerifierError
from services.reward.verifiers.base import Score, right_or_wrong

UNLIMITED = 0
"""What math-verify takes for `no time limit`."""

_DOLLAR = re.compile(r"(?<!\\)(?:\\\\)*\$")
"""A dollar sign that opens or closes a formula; `\\$` is the currency's."""
PAIR = 2

for _noisy in ("math_verify.parser", "math_verify.grader", "math_verify.utils"):
    logging.getLogger(_noisy).setLevel(logging.ERROR)


def verify(response: str, ground_truth: str, extra_info: dict[str, Any]) -> Score:  # noqa: ARG001
    """The last expression in the response (a boxed one before others) is mathematically the reference.

    What cannot be parsed in the response is a wrong answer.

    Raises:
        VerifierError: the reference is empty or cannot be parsed.
    """
    reference = list(_parse_reference(ground_truth))
    found = parse(response, parsing_timeout=UNLIMITED)
    right = bool(found) and equal(reference, found, timeout_seconds=UNLIMITED)
    # The parsed values are not shown: turning a huge number into text may take for ever. The last one is the text it was parsed from.
    shown = next((value[:80] for value in reversed(found) if isinstance(value, str)), "the answer") if found else None
    return right_or_wrong(right, shown, ground_truth[:80])


@lru_cache(maxsize=256)
def _parse_reference(ground_truth: str) -> tuple[Any, ...]:
    marked = "\\boxed" in ground_truth or len(_DOLLAR.findall(ground_truth)) >= PAIR
    parsed = parse(ground_truth if marked else f"\\boxed{{{ground_truth}}}", parsing_timeout=UNLIMITED)
    if not ground_truth.strip() or not parsed:
        raise VerifierError(f"ground_truth {ground_truth[:80]!r} cannot be parsed")
    return tuple(parsed)
