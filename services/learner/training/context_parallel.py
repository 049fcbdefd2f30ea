"""Context parallelism (CP): a rank's part of a micro-batch, and figures of all response tokens from those of every rank.

A rank computes embeddings, MLPs, queries and logits of its own positions (`context_chunks`). Keys and values are gathered
(`megatron/context_attention.py`), and so are the figures of response tokens: each rank has those of the whole micro-batch, so a loss may
look at whole sequences. Its gradient goes to the rank's own tokens only, and the sum over the ranks is the gradient of the whole.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from services.learner.training.batch import MicroBatch
from services.learner.training.context_chunks import chunks_of
from services.learner.training.prompt_sharing import Segment, encode_segments


def part_of(batch: MicroBatch, size: int, rank: int) -> MicroBatch:
    """A rank's part of a micro-batch of one row, whose length 2 · `size` divides: its tokens, and which response tokens it predicts."""
    device, length = batch.tokens.device, batch.tokens.shape[1]
    rotary = torch.arange(length, device=device) if batch.position_ids is None else batch.position_ids
    mine = torch.arange(length, device=device).view(2 * size, -1)[list(chunks_of(size, rank))].flatten()
    place = torch.full((length,), -1, device=device)
    place[mine] = torch.arange(len(mine), device=device)
    local = place[batch.positions]
    own = (local >= 0).nonzero()[:, 0]
    return replace(
        batch,
        tokens=batch.tokens[:, mine],
        attention=encode_segments([Segment(length, is_prompt=True)]) if batch.attention is None else batch.attention,
        position_ids=rotary[mine],
        positions=local[own],
        own=own,
    )


def all_tokens(own: torch.Tensor, batch: MicroBatch, group: dist.ProcessGroup | None) -> torch.Tensor:
    """A figure of every response token of the micro-batch, [R, …], from that of the rank's own; on one rank they are the same.

    `group`: the ranks that share the row.
    """
    if batch.own is None:
        return own
    found: torch.Tensor = _AllTokens.apply(own, batch.own, len(batch.targets), group)  # type: ignore[no-untyped-call]
    return found


class _AllTokens(torch.autograd.Function):
    """Every element is written by one rank, so the sum over the ranks is exact. The gradient stays with the rank's own tokens."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  torch's own type of it is private
        own: torch.Tensor,
        places: torch.Tensor,
        count: int,
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(places)
        found = own.new_zeros(count, *own.shape[1:]).index_copy_(0, places, own)
        dist.all_reduce(found, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # noqa: ANN401
        return gradients[0].index_select(0, ctx.saved_tensors[0]), None, None, None
