"""Passes over a batch: its division into micro-batches, and runs over them of the model of any role.

sequences ─► plan for all data-parallel ranks ─► this rank's micro-batches ─► forward, or forward and backward
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from services.common.spec.learner import LearnerSpec
from services.learner.groups.sequence import Sequence
from services.learner.training.backend import Backend, Model
from services.learner.training.batch import MicroBatch, RowForm, collate, padded_length, response_offsets, shared_tokens
from services.learner.training.context_parallel import part_of
from services.learner.training.micro_batches import MicroBatchPlan, plan_micro_batches, plan_shared_prompts


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """A batch, or the part of it that one optimizer step takes, as this rank computes it."""

    sequences: list[Sequence]
    micro_batches: list[MicroBatch]
    tokens: int
    """Unmasked response tokens of all ranks."""
    counting: int
    """Sequences that have one."""
    real: int
    """Positions that hold a token, of all ranks."""
    computed: int
    """Positions that are computed, padding included."""


class Passes:
    """Passes of this rank."""

    def __init__(self, learner: LearnerSpec, backend: Backend) -> None:
        self._learner, self._layout, self._device = learner, backend.layout, backend.device
        self._form = RowForm.SHARED if learner.shared_prompts else backend.row_form

    def prepare(self, sequences: list[Sequence], offsets: list[int] | None = None) -> PreparedBatch:
        """Divides a batch; every rank gets the whole. `offsets`: where the response tokens of each sequence begin in the step's columns."""
        learner, layout, ranks = self._learner, self._layout, self._layout.dp_size
        most, multiple = learner.max_tokens_per_micro_batch * layout.cp_size, learner.row_multiple
        if self._form is RowForm.SHARED:
            plan = plan_shared_prompts(sequences, ranks, max_tokens=most, multiple=multiple)
        else:
            plan = plan_micro_batches(sequences, ranks, max_tokens=most, packing=learner.packing, multiple=multiple)
        offsets = response_offsets(sequences) if offsets is None else offsets
        real, computed = self._positions(sequences, plan)
        whole = [
            collate(sequences, rows, offsets, self._device, form=self._form, multiple=multiple)
            for rows in plan[layout.dp_rank]
        ]
        return PreparedBatch(
            sequences=sequences,
            micro_batches=[part_of(b, layout.cp_size, layout.cp_rank) for b in whole] if layout.cp_size > 1 else whole,
            tokens=sum(int(s.loss_mask.sum()) for s in sequences),
            counting=sum(bool(s.loss_mask.any()) for s in sequences),
            real=real,
            computed=computed,
        )

    @torch.no_grad()
    def collect(
        self, model: Model, batch: PreparedBatch, value_of: Callable[[MicroBatch, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """`value_of` each response token [R] from the output at it: float32 [N] in the order of the batch, on every rank."""
        values = torch.zeros(response_offsets(batch.sequences)[-1], dtype=torch.float32, device=self._device)

        def keep(micro_batch: MicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            found = value_of(micro_batch, output)
            if self._layout.reports_losses:
                real = micro_batch.offsets >= 0
                values[micro_batch.offsets[real]] = found[real]
            return found.new_zeros(()), micro_batch.loss_mask.sum().int()

        model.run(batch.micro_batches, keep, forward_only=True)
        if dist.get_world_size() > 1:
            dist.all_reduce(values)  # only one rank writes each element, so the sum is exact
        return values

    def _positions(self, sequences: list[Sequence], plan: list[list[MicroBatchPlan]]) -> tuple[int, int]:
        """Positions that hold a token, and positions that are computed."""
        shared = self._form is RowForm.SHARED
        real = computed = 0
        for rows in (rows for rank in plan for rows in rank):
            lengths = [shared_tokens(sequences, r) if shared else sum(sequences[i].row_len for i in r) for r in rows]
            lengths = lengths if self._form is RowForm.PADDED else [sum(lengths)]
            real += sum(lengths)
            computed += (len(lengths) or 1) * padded_length(max([1, *lengths]), self._learner.row_multiple)
        return real, computed
