"""Interface of a token loss: its inputs and results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The response tokens of one micro-batch, R in all; those of each sequence are contiguous.

    A loss is a sum over tokens, divided by `global_tokens` afterwards. A loss that averages over sequences weights its tokens
    accordingly: `global_tokens / (global_sequences · tokens of the sequence)`.
    """

    trainer_logprobs: torch.Tensor
    """float32 [R], of the weights being trained; the only input with a gradient."""
    old_logprobs: torch.Tensor
    """float32 [R], of the proximal policy: the engine's, or the trainer's own at the start of the step."""
    inference_logprobs: torch.Tensor
    """float32 [R], of the sampling policy."""
    advantages: torch.Tensor
    """float32 [R]."""
    loss_mask: torch.Tensor
    """bool [R]; the loss of a masked token is ignored."""
    sequence_ids: torch.Tensor
    """int64 [R], 0 to sequences − 1 within this micro-batch, never decreasing."""
    global_tokens: int
    """Unmasked tokens of the whole global batch, at least 1."""
    global_sequences: int
    """Sequences of the whole global batch with at least one unmasked token."""


class LossFunction(Protocol):
    """A token loss. Pure; also called for empty micro-batches, with one masked token."""

    def __call__(self, inputs: LossInputs, /) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Returns the loss of each token, [R], and named metrics of each token, [R], whose mean over the global batch is reported."""
