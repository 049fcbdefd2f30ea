"""Outcome estimators: one advantage per rollout, from the rewards of its group. All in float64; every standard deviation has ddof = 1."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from services.common.spec.algorithm import CURRENT_REVISION, FIRST_REVISION
from services.common.spec.choices import AdvantageEstimator

Float64Array = npt.NDArray[np.float64]
RewardGroups = Sequence[npt.ArrayLike]
"""One [G] of rewards per group; the groups of a batch may differ in G, since a group can close with fewer rollouts."""
LengthGroups = Sequence[npt.ArrayLike]
"""One [G] of response lengths, sampled tokens, per group."""
WHITEN_EPSILON = 1e-8
"""Added to a variance, as in other implementations of masked whitening."""
EPSILON = 1e-6
"""Keeps the division defined where all rewards of a group are equal: their advantages are then 0."""


def grpo(rewards: RewardGroups) -> list[Float64Array]:
    """A_i = (R_i − mean R) / (std R + 1e-6) within the group (arXiv 2402.03300)."""
    return [(group - group.mean()) / (group.std(ddof=1) + EPSILON) for group in _checked(rewards)]


def grpo_of_turns(rewards: Sequence[Sequence[npt.ArrayLike]]) -> list[list[Float64Array]]:
    """A_t = Σ_{s ≥ t} (r_s − mean r) / (std r + 1e-6), mean and std over all turns of the group (arXiv 2402.03300, section 4.1.3).

    Args:
        rewards: of each group, one [turns] per rollout.
    """
    found = []
    for group in rewards:
        rollouts = [np.asarray(turns, np.float64) for turns in group]
        (scaled,) = grpo([np.concatenate(rollouts)])
        parts = np.split(scaled, np.cumsum([len(turns) for turns in rollouts])[:-1])
        found.append([part[::-1].cumsum()[::-1] for part in parts])
    return found


def dr_grpo(rewards: RewardGroups) -> list[Float64Array]:
    """A_i = R_i − mean R within the group: no scale, so easy and hard tasks weigh the same (arXiv 2503.20783)."""
    return [group - group.mean() for group in _checked(rewards)]


def rloo(rewards: RewardGroups) -> list[Float64Array]:
    """A_i = R_i − mean of the other rewards of the group (arXiv 2402.14740)."""
    return [group - (group.sum() - group) / (len(group) - 1) for group in _checked(rewards)]


def reinforce_plus_plus_baseline(rewards: RewardGroups, lengths: LengthGroups) -> list[Float64Array]:
    """R_i − mean R of the group, then whitened over all response tokens of the batch: (x − mean x) / sqrt(var x + 1e-8).

    Each rollout counts once per sampled token, as in OpenRLHF and verl (arXiv 2501.03262), whose variance also has ddof = 1.
    A batch of fewer than two tokens is only centred.
    """
    centred = dr_grpo(rewards)
    weights = _same_shapes(lengths, centred)
    tokens = sum(float(group.sum()) for group in weights)
    if tokens < 2.0:
        return centred
    pairs = list(zip(weights, centred, strict=True))
    mean = sum(float(weight @ group) for weight, group in pairs) / tokens
    variance = sum(float(weight @ (group - mean) ** 2) for weight, group in pairs) / (tokens - 1.0)
    return [(group - mean) / math.sqrt(variance + WHITEN_EPSILON) for group in centred]


def reinforce_plus_plus_by_rollouts(rewards: RewardGroups) -> list[Float64Array]:
    """Revision 1 of `reinforce_plus_plus_baseline`: divided by (std + 1e-6) over all rollouts of the batch, long and short alike.

    The batch's mean needs no subtraction: every group's mean is 0 already.
    """
    centred = dr_grpo(rewards)
    if not centred:
        return []
    scale = float(np.concatenate(centred).std(ddof=1)) + EPSILON
    return [group / scale for group in centred]


def batch_advantages(
    rewards: RewardGroups, estimator: AdvantageEstimator, lengths: LengthGroups, *, revision: int = CURRENT_REVISION
) -> list[Float64Array]:
    """The advantage of each rollout, in the shapes of `rewards`; `lengths`: sampled tokens of each rollout, in the same shapes.

    The rewards are after shaping, and of the whole batch of a step, since an estimator may normalise over it. `revision` is that of
    the estimator's formula (`algorithm.revision`).

    Raises:
        ValueError: a group has fewer than 2 rewards, one that is not finite, or another number of lengths (names its place in the
            batch); or the estimator is one of tokens.
    """
    match estimator:
        case AdvantageEstimator.GRPO:
            return grpo(rewards)
        case AdvantageEstimator.DR_GRPO:
            return dr_grpo(rewards)
        case AdvantageEstimator.RLOO:
            return rloo(rewards)
        case AdvantageEstimator.REINFORCE_PLUS_PLUS_BASELINE if revision == FIRST_REVISION:
            return reinforce_plus_plus_by_rollouts(rewards)
        case AdvantageEstimator.REINFORCE_PLUS_PLUS_BASELINE:
            return reinforce_plus_plus_baseline(rewards, lengths)
        case AdvantageEstimator.REINFORCE_PLUS_PLUS | AdvantageEstimator.GAE:
            raise ValueError(f"{estimator} has an advantage for each token, none for a whole rollout")


def _checked(rewards: RewardGroups) -> list[Float64Array]:
    groups = [np.asarray(group, np.float64) for group in rewards]
    for place, group in enumerate(groups):
        if group.ndim != 1 or len(group) < 2:
            shape = f"rewards of shape {group.shape}"
            raise ValueError(f"group {place} of the batch has {shape}; an advantage needs at least 2 rollouts")
        if not np.isfinite(group).all():
            raise ValueError(f"group {place} of the batch has a reward that is not finite: {group.tolist()}")
    return groups


def _same_shapes(lengths: LengthGroups, groups: list[Float64Array]) -> list[Float64Array]:
    weights = [np.asarray(group, np.float64) for group in lengths]
    for place, group in enumerate(groups):
        if place >= len(weights) or weights[place].shape != group.shape:
            raise ValueError(f"group {place} of the batch has {len(group)} rewards, and not as many lengths")
    return weights
