"""Dynamic sampling: which groups carry an advantage (DAPO, arXiv 2503.14476)."""

from __future__ import annotations

import math
from collections.abc import Iterable

from services.common.spec import FilterMetric


def filter_values(metric: FilterMetric, *, accuracies: list[float], rewards: list[float]) -> list[float]:
    """What `filter_groups_metric` compares. Rewards are the verifier's own: with length shaping every group would look informative."""
    return accuracies if metric is FilterMetric.ACCURACY else rewards


def is_degenerate(values: Iterable[float]) -> bool:
    """Whether all values of a group are equal, that is std = 0: nothing to learn from. A group of none or one is degenerate too.

    Compared exactly: the computed std of equal floats need not be 0 (three times 0.1 gives 1.4e-17).

    Raises:
        ValueError: a value is not finite.
    """
    seen = list(values)
    if not all(math.isfinite(value) for value in seen):
        raise ValueError(f"a group's values must be finite, not {seen}")
    return len(set(seen)) < 2
