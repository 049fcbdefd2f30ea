r"""Fuzzy match: how alike answer and reference are, 0..1, by `rapidfuzz` (normalised Indel similarity). It is accurate from a threshold on.

The answer is found, and both are normalised, as in `exact_match`. `fuzzy_threshold` (default 0.9) is the similarity from which the
accuracy is 1. The row's extra_info may have further right answers: `answers`, a list of texts; the most alike counts.
"""

from __future__ import annotations

from typing import Any

from rapidfuzz import fuzz

from services.common.spec.verifiers import FuzzyMatchSettings
from services.reward.verifiers.answers import normalised, references, stated
from services.reward.verifiers.base import Score, settings_of


def verify(response: str, ground_truth: str, extra_info: dict[str, Any]) -> Score:
    """The similarity. Raises VerifierError when the row has no right answer, or the threshold is none."""
    threshold = settings_of(FuzzyMatchSettings, extra_info).fuzzy_threshold
    marked = stated(response)
    answer = normalised(response if marked is None else marked)
    alike = max(fuzz.ratio(answer, normalised(each)) / 100.0 for each in references(ground_truth, extra_info))
    return Score(alike, 1.0 if alike >= threshold else 0.0, f"{answer[:80]!r} is {alike:.3f} alike")
