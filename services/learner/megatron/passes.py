"""Passes over a batch: its division into micro-batches, and Megatron's schedule over them, for the model of any role.

sequences ─► plan for all data-parallel ranks ─► this rank's micro-batches ─► forward, or forward and backward
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func

from services.common.spec.learner import LearnerSpec
from services.learner.groups.sequence import Sequence
from services.learner.megatron.batch import MicroBatch, collate, padded_length, response_offsets, shared_tokens
from services.learner.megatron.context_parallel import part_of
from services.learner.megatron.micro_batches import MicroBatchPlan, plan_micro_batches, plan_shared_prompts
from services.learner.megatron.model import ModelPart
from services.learner.megatron.parallel import Layout

OnOutput = Callable[[MicroBatch, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""The last stage's function of a micro-batch and its output [R, …]: returns the summed loss, and its number of tokens."""


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

    def __init__(self, learner: LearnerSpec, layout: Layout, device: torch.device) -> None:
        self._learner, self._layout, self._device = learner, layout, device

    def prepare(self, sequences: list[Sequence], offsets: list[int] | None = None) -> PreparedBatch:
        """Divides a batch; every rank gets the whole. `offsets`: where the response tokens of each sequence begin in the step's columns."""
        learner, layout, ranks = self._learner, self._layout, self._layout.dp_size
        most, multiple = learner.max_tokens_per_micro_batch * layout.cp_size, learner.row_multiple
        if learner.shared_prompts:
            plan = plan_shared_prompts(sequences, ranks, max_tokens=most, multiple=multiple)
        else:
            plan = plan_micro_batches(sequences, ranks, max_tokens=most, packing=learner.packing, multiple=multiple)
        if layout.cp_size > 1 and not learner.shared_prompts:  # one row all the same: each response with its own prompt
            plan = [[[(i,) for row in rows for i in row] for rows in rank] for rank in plan]
        offsets = response_offsets(sequences) if offsets is None else offsets
        real, computed = self._positions(sequences, plan)
        whole = [
            collate(sequences, rows, offsets, self._device, shared=self._one_row, multiple=multiple)
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

    def run(self, part: ModelPart, batch: PreparedBatch, on_output: OnOutput, *, forward_only: bool) -> None:
        """Runs Megatron's schedule over the micro-batches: pipelined where there are stages; gradients are reduced at the end."""

        def forward_step(batches: Iterator[MicroBatch], _: object) -> tuple[torch.Tensor, Callable[..., Any]]:
            micro_batch = next(batches)

            def loss_of(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
                loss, tokens = on_output(micro_batch, output[0])
                # context-parallel ranks have the same tokens, each with the gradient of its own
                return loss, tokens if self._layout.cp_rank == 0 else torch.zeros_like(tokens), {}

            return part.forward(micro_batch), loss_of

        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(batch.micro_batches),
            model=[part.model],
            num_microbatches=len(batch.micro_batches),
            seq_length=max(micro_batch.tokens.shape[1] for micro_batch in batch.micro_batches),
            micro_batch_size=1,  # stages send shapes with the tensors; this and `seq_length` are ignored
            forward_only=forward_only,
        )

    @torch.no_grad()
    def collect(
        self, part: ModelPart, batch: PreparedBatch, value_of: Callable[[MicroBatch, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """`value_of` each response token [R] from the output at it: float32 [N] in the order of the batch, on every rank."""
        values = torch.zeros(response_offsets(batch.sequences)[-1], dtype=torch.float32, device=self._device)

        def keep(micro_batch: MicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            found = value_of(micro_batch, output)
            if self._layout.reports_losses:
                real = micro_batch.offsets >= 0
                values[micro_batch.offsets[real]] = found[real]
            return found.new_zeros(()), micro_batch.loss_mask.sum().int()

        self.run(part, batch, keep, forward_only=True)
        if dist.get_world_size() > 1:
            dist.all_reduce(values)  # only one rank writes each element, so the sum is exact
        return values

    @property
    def _one_row(self) -> bool:
        """Whether a micro-batch is one row of segments."""
        return self._learner.shared_prompts or self._layout.cp_size > 1

    def _positions(self, sequences: list[Sequence], plan: list[list[MicroBatchPlan]]) -> tuple[int, int]:
        """Positions that hold a token, and positions that are computed."""
        shared = self._one_row
        real = computed = 0
        for rows in (rows for rank in plan for rows in rank):
            lengths = [shared_tokens(sequences, r) if shared else sum(sequences[i].row_len for i in r) for r in rows]
            lengths = [sum(lengths)] if shared else lengths
            real += sum(lengths)
            computed += (len(lengths) or 1) * padded_length(max([1, *lengths]), self._learner.row_multiple)
        return real, computed
