"""Tally of the losses and metrics of single tokens: their sums over micro-batches and ranks."""

from __future__ import annotations

from collections import defaultdict

import torch
import torch.distributed as dist

from services.learner.training.collectives import gather_json
from services.learner.training.layout import Layout


class Tally:
    """Sums in float64, for NPUs, which lack that type, on the CPU. Nothing else waits for the device before `means` and `largest`.

    Only ranks on the last pipeline stage compute losses; `means` is for every rank.
    """

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}
        self._largest_differences: list[torch.Tensor] = []

    def add(self, values: dict[str, torch.Tensor], mask: torch.Tensor) -> None:
        """Adds the unmasked tokens' values, each [R]."""
        for name, value in values.items():
            kept = torch.where(mask, value.detach(), value.new_zeros(()))
            kept = (kept.cpu() if kept.device.type == "npu" else kept).double().sum()
            self._sums[name] = self._sums[name] + kept if name in self._sums else kept

    def add_difference(self, difference: torch.Tensor, mask: torch.Tensor) -> None:
        """Keeps the largest absolute value of the unmasked tokens."""
        kept = torch.where(mask, difference.detach().abs(), difference.new_zeros(()))
        self._largest_differences.append(kept.max())

    def means(self, layout: Layout, device: torch.device, tokens: int) -> dict[str, float]:
        """On every rank, the sums of all ranks by name, divided by the tokens of the batch."""
        values = torch.stack(list(self._sums.values())).tolist() if self._sums else []
        mine = dict(zip(self._sums, values, strict=True)) if layout.reports_losses else {}
        sums: dict[str, float] = defaultdict(float)
        for part in gather_json(mine, device):  # in the order of the ranks, whose names may differ
            for name, value in part.items():
                sums[name] += value
        return {name: total / tokens for name, total in sums.items()}

    def largest(self, device: torch.device) -> float:
        """On every rank, the largest difference of all ranks."""
        mine = self._largest_differences or [torch.zeros((), device=device)]
        largest = torch.stack(mine).max().float()
        if dist.get_world_size() > 1:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return float(largest)
