"""GSM8K verifier: compares the final number. Reward 1 or 0."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from services.common.errors import VerifierError
from services.reward.verifiers.base import Score, right_or_wrong
from services.reward.verifiers.dapo_math import last_boxed
from services.reward.verifiers.decimals import first_number, last_number

MARK = "####"


def verify(response: str, ground_truth: str, extra_info: dict[str, Any]) -> Score:  # noqa: ARG001
    r"""Compares the number after the last `####` that has one, or without any mark that in the last `\boxed{…}`, or the last one.

    The reference is the number itself or the dataset's whole worked answer. Raises VerifierError when it contains no number.
    """
    reference = final_number(ground_truth)
    if reference is None:
        raise VerifierError(f"ground_truth {ground_truth[:80]!r} holds no number")
    found = final_number(response)
    return right_or_wrong(found == reference, None if found is None else f"{found:f}"[:80], f"{reference:f}"[:80])


def final_number(text: str) -> Decimal | None:
    """The final number of a worked answer, or None. Of several marks, the last that a number follows before the next mark counts."""
    before, *marked = text.split(MARK)
    if not marked:
        boxed = first_number(last_boxed(before) or "")
        return last_number(before) if boxed is None else boxed
    return next((number for after in reversed(marked) if (number := first_number(after)) is not None), None)
