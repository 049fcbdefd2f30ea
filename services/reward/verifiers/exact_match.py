r"""Exact match: the answer is the reference, after normalisation. Reward 1 or 0.

The answer is the last `<answer>…</answer>` of the response, else the last `\boxed{…}`, else the last `Answer: …`, else the whole response.
Case, spaces, forms of Unicode, and quotes and punctuation around it do not count (`exact_case: true`: case does).

The row's extra_info may have further right answers: `answers`, a list of texts.
"""

from __future__ import annotations

from typing import Any

from services.common.spec.verifiers import ExactMatchSettings
from services.reward.verifiers.answers import normalised, references, stated
from services.reward.verifiers.base import Score, right_or_wrong, settings_of


def verify(response: str, ground_truth: str, extra_info: dict[str, Any]) -> Score:
    """Compares the answer with every right one. Raises VerifierError when the row has none."""
    case = settings_of(ExactMatchSettings, extra_info).exact_case
    right = [normalised(each, case=case) for each in references(ground_truth, extra_info)]
    marked = stated(response)
    answer = normalised(response if marked is None else marked, case=case)
    return right_or_wrong(answer in right, repr(answer[:80]) if answer else None, repr(right[0][:80]))
