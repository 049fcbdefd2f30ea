"""The fuzzy verifier: alike is a number, and right is a threshold."""

from __future__ import annotations

from typing import Any

import pytest

from services.common.errors import VerifierError

fuzzy_match = pytest.importorskip("services.reward.verifiers.fuzzy_match", exc_type=ImportError)


@pytest.mark.parametrize(
    ("response", "reference", "reward", "accuracy"),
    [
        ("Paris", "Paris", 1.0, 1.0), ("Answer: PARIS.", "paris", 1.0, 1.0), ("", "paris", 0.0, 0.0), ("xyz", "paris", 0.0, 0.0),
        ("Answer: Mississipi River", "Mississippi River", 2 * 16 / 33, 1.0), ("abcd", "abxy", 0.5, 0.0),
    ],
)  # fmt: skip
def test_the_reward_is_how_alike_they_are(response: str, reference: str, reward: float, accuracy: float) -> None:
    """Independent reference: twice the longest common subsequence over the sum of the lengths."""
    score = fuzzy_match.verify(response, reference, {})
    assert score.reward == pytest.approx(reward)
    assert score.accuracy == accuracy


def test_the_threshold_is_the_jobs_or_the_rows() -> None:
    assert fuzzy_match.verify("abcd", "abxy", {"fuzzy_threshold": 0.5}).accuracy == 1.0


def test_the_most_alike_of_several_right_answers_counts() -> None:
    assert fuzzy_match.verify("NYC", "New York City", {"answers": ["NYC"]}).reward == 1.0


@pytest.mark.parametrize("threshold", [0, -1, 1.1, "0.9", True, None])
def test_a_threshold_that_is_none_is_no_wrong_answer(threshold: Any) -> None:
    with pytest.raises(VerifierError, match="fuzzy_threshold"):
        fuzzy_match.verify("x", "x", {"fuzzy_threshold": threshold})
