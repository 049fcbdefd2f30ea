"""Adds up, over micro-batches and ranks, what the losses and metrics of single tokens are."""

from __future__ import annotations

import torch
import torch.distributed as dist

from services.learner.megatron.collectives import sum_by_name
from services.learner.megatron.parallel import Layout


class Tally:
    """Sums in float64. Only ranks on the last pipeline stage see losses; `totals` tells every rank."""

    def __init__(self) -> None:
        """Nothing yet."""
        self._sums: dict[str, torch.Tensor] = {}
        self._largest_difference = 0.0

    def add(self, values: dict[str, torch.Tensor], mask: torch.Tensor) -> None:
        """Adds the unmasked tokens' values, each [R]."""
        for name, value in values.items():
            kept = torch.where(mask, value.detach(), value.new_zeros(())).double().sum()
            self._sums[name] = self._sums[name] + kept if name in self._sums else kept

    def add_difference(self, difference: torch.Tensor, mask: torch.Tensor) -> None:
        """Keeps the largest absolute value of the unmasked."""
        kept = torch.where(mask, difference.detach().abs(), difference.new_zeros(()))
        self._largest_difference = max(self._largest_difference, float(kept.max()))

    def totals(self, layout: Layout, device: torch.device) -> dict[str, float]:
        """Sums over all ranks that see different losses, on every rank; and `max_abs_logprob_difference`, the largest of all."""
        mine = {name: float(value) for name, value in self._sums.items()} if layout.speaks_for_its_batch else {}
        totals = sum_by_name(mine, device)
        largest = torch.full((1,), self._largest_difference, dtype=torch.float32, device=device)
        if dist.get_world_size() > 1:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return totals | {"max_abs_logprob_difference": float(largest)}
