"""Columns of a step: what the models say of each response token of the batch, before the first optimizer step changes them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.learner.training.batch import MicroBatch


@dataclass(frozen=True, slots=True)
class Columns:
    """float32 [N] each, N response tokens in the order of the batch, the same on every rank; None where the job needs none.

    Example, of a group of two responses with 2 and 1 tokens under PPO: Columns(advantages=[.3, .1, -.4], old_logprobs=[-1.2, -.4, -2.],
    reference_logprobs=[-1.1, -.4, -1.9], values=[.4, .6, .4], returns=[.7, .7, 0.])
    """

    advantages: torch.Tensor
    old_logprobs: torch.Tensor | None = None
    """The actor's own at the start of the step."""
    reference_logprobs: torch.Tensor | None = None
    values: torch.Tensor | None = None
    """The critic's at the start of the step."""
    returns: torch.Tensor | None = None
    """What the critic's values are trained towards."""
    proximal_share: torch.Tensor | None = None
    """α of the interpolated proximal policy."""
    importance_kept: torch.Tensor | None = None
    """bool: tokens that M2PO keeps."""


def of(column: torch.Tensor | None, batch: MicroBatch) -> torch.Tensor | None:
    """A column's values [R] of a micro-batch; of an empty one any value, since its token is masked."""
    return None if column is None else column[batch.offsets]


def needed(column: torch.Tensor | None, batch: MicroBatch) -> torch.Tensor:
    """The same of a column that the caller cannot do without. Raises ValueError where it is missing."""
    if column is None:
        raise ValueError("a column that the objective needs was not made")
    return column[batch.offsets]
