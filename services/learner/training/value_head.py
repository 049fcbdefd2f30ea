"""Value head: one number for each position, in place of a model's output layer."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

SAVED_NAME = "value_head.weight"
"""In a checkpoint of backend fsdp2."""
HF_NAME = "score.weight"
"""In a Hugging Face sequence classifier."""


class ValueHead(torch.nn.Module):
    """A linear layer to a scalar, the same on every tensor-parallel rank; with weights of 0 at first, every value is 0.

    Tensor-parallel ranks have equal inputs, so they have equal gradients, and need no reduction.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden_size))

    def forward(self, hidden: torch.Tensor, **_: object) -> tuple[torch.Tensor, None]:
        """[R, 1, h] → [R, 1, 1] in float32; Megatron's other arguments describe output layers over a vocabulary."""
        return linear(hidden.float(), self.weight.float()), None
