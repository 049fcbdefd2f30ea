"""From the rewards of groups to an advantage per rollout. All in float64; every standard deviation has ddof = 1."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from services.common.spec import AdvantageEstimator

Float64Array = npt.NDArray[np.float64]
RewardGroups = Sequence[npt.ArrayLike]
"""One [G] of rewards per group; the groups of a batch may differ in G, since a group can close with fewer rollouts."""

EPSILON = 1e-6
"""Keeps the division defined where all rewards of a group are equal: their advantages are then 0."""


def grpo(rewards: RewardGroups) -> list[Float64Array]:
    """A_i = (R_i − mean R) / (std R + 1e-6) within the group (arXiv 2402.03300)."""
    return [(group - group.mean()) / (group.std(ddof=1) + EPSILON) for group in _checked(rewards)]


def dr_grpo(rewards: RewardGroups) -> list[Float64Array]:
    """A_i = R_i − mean R within the group: no scale, so easy and hard tasks weigh the same (arXiv 2503.20783)."""
    return [group - group.mean() for group in _checked(rewards)]


def rloo(rewards: RewardGroups) -> list[Float64Array]:
    """A_i = R_i − mean of the other rewards of the group (arXiv 2402.14740)."""
    return [group - (group.sum() - group) / (len(group) - 1) for group in _checked(rewards)]


def reinforce_plus_plus_baseline(rewards: RewardGroups) -> list[Float64Array]:
    """R_i − mean R of the group, then divided by (std + 1e-6) over all rollouts of the batch (arXiv 2501.03262).

    The batch's mean needs no subtraction: every group's mean is 0 already.
    """
    centred = dr_grpo(rewards)
    if not centred:
        return []
    scale = float(np.concatenate(centred).std(ddof=1)) + EPSILON
    return [group / scale for group in centred]


ESTIMATORS: dict[AdvantageEstimator, Callable[[RewardGroups], list[Float64Array]]] = {
    AdvantageEstimator.GRPO: grpo,
    AdvantageEstimator.DR_GRPO: dr_grpo,
    AdvantageEstimator.RLOO: rloo,
    AdvantageEstimator.REINFORCE_PLUS_PLUS_BASELINE: reinforce_plus_plus_baseline,
}


def batch_advantages(rewards: RewardGroups, estimator: AdvantageEstimator) -> list[Float64Array]:
    """The advantage of each rollout of a whole batch, in the shapes of `rewards`.

    Args:
        rewards: after shaping; the whole batch of a step, since an estimator may normalise over it.
        estimator: which one.

    Raises:
        ValueError: a group has fewer than 2 rewards, or one that is not finite; names the group by its place in the batch.
    """
    return ESTIMATORS[estimator](rewards)


def _checked(rewards: RewardGroups) -> list[Float64Array]:
    groups = [np.asarray(group, np.float64) for group in rewards]
    for place, group in enumerate(groups):
        if group.ndim != 1 or len(group) < 2:
            raise ValueError(
                f"group {place} of the batch has rewards of shape {group.shape}; an advantage needs at least 2 rollouts"
            )
        if not np.isfinite(group).all():
            raise ValueError(f"group {place} of the batch has a reward that is not finite: {group.tolist()}")
    return groups
