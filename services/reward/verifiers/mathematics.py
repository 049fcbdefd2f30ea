"""Mathematics verifier: symbolic comparison by the `math-verify` package. Reward 1 or 0.

The package parses the response with sympy, which evaluates: `9^9^9^9` runs for ever. The package's own time limits are off, since they
use signals, which cannot interrupt all code; the worker process is killed instead.
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
"""math-verify's value for no time limit."""

_DOLLAR = re.compile(r"(?<!\\)(?:\\\\)*\$")
"""A dollar sign that opens or closes a formula; `\\$` is the currency's."""

for _noisy in ("math_verify.parser", "math_verify.grader", "math_verify.utils"):
    logging.getLogger(_noisy).setLevel(logging.ERROR)


def verify(response: str, ground_truth: str, extra_info: dict[str, Any]) -> Score:  # noqa: ARG001
    """Compares the last expression of the response (a boxed one before others) with the reference.

    A response that cannot be parsed is a wrong answer. Raises VerifierError when the reference is empty or cannot be parsed.
    """
    reference = list(_parse_reference(ground_truth))
    found = parse(response, parsing_timeout=UNLIMITED)
    right = bool(found) and equal(reference, found, timeout_seconds=UNLIMITED)
    # Not the parsed values: the conversion of a huge number into text may take for ever. The last element is the parsed text itself.
    shown = next((value[:80] for value in reversed(found) if isinstance(value, str)), "the answer") if found else None
    return right_or_wrong(right, shown, ground_truth[:80])


@lru_cache(maxsize=256)
def _parse_reference(ground_truth: str) -> tuple[Any, ...]:
    marked = "\\boxed" in ground_truth or len(_DOLLAR.findall(ground_truth)) >= 2
    parsed = parse(ground_truth if marked else f"\\boxed{{{ground_truth}}}", parsing_timeout=UNLIMITED)
    if not ground_truth.strip() or not parsed:
        raise VerifierError(f"ground_truth {ground_truth[:80]!r} cannot be parsed")
    return tuple(parsed)
