"""Losses of the critic's values, and how much of the returns they explain."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """½ max((V − R)², (clip(V, V_old ± c) − R)²) for each token [R], differentiable in V; and where the clipped one is larger, bool [R].

    A value that has moved more than c from the old one towards its return gets no more gradient (arXiv 1707.06347's code, 1811.02553).

    Args:
        values: [R], of the critic in training.
        old_values: [R], of the critic at the start of the step.
        returns: [R], the targets (`Estimate.returns`).
        clip: c, above 0; None: ½ (V − R)².
    """
    squares = (values - returns).square()
    if clip is None:
        return 0.5 * squares, torch.zeros_like(squares, dtype=torch.bool)
    near = values.clamp(old_values - clip, old_values + clip)
    near_squares = (near - returns).square()
    clipped = near_squares > squares
    return 0.5 * torch.where(clipped, near_squares, squares), clipped.detach()


def explained_variance(values: npt.ArrayLike, returns: npt.ArrayLike, mask: npt.ArrayLike) -> float:
    """1 − Var(returns − values) / Var(returns) over the unmasked tokens, in float64: 1 for a perfect critic, 0 for a constant one.

    It is negative for a critic that is worse than a constant; and 0 where the returns do not vary, or there are none.

    Args:
        values: [R], without gradient.
        returns: [R].
        mask: bool [R].
    """
    counts = np.asarray(mask, bool)
    targets = np.asarray(returns, np.float64)[counts]
    if len(targets) == 0 or np.ptp(targets) == 0.0:
        return 0.0
    rest = targets - np.asarray(values, np.float64)[counts]
    return 1.0 - float(rest.var() / targets.var())
