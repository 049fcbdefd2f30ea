"""Collectives for values that are not tensors: JSON in byte tensors, and flags."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


def gather_json(value: Any, device: torch.device) -> list[Any]:  # noqa: ANN401  any JSON value
    """Every rank's value, on every rank, in the order of the ranks."""
    world_size = dist.get_world_size()
    if world_size == 1:
        return [value]
    payload = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = torch.zeros(world_size, dtype=torch.int64, device=device)
    sizes[dist.get_rank()] = len(payload)
    dist.all_reduce(sizes)
    lengths = [int(size) for size in sizes.tolist()]
    mine = torch.zeros(max(lengths), dtype=torch.uint8)
    mine[: len(payload)] = payload
    parts = [torch.zeros(max(lengths), dtype=torch.uint8, device=device) for _ in lengths]
    dist.all_gather(parts, mine.to(device))
    return [json.loads(bytes(part[:n].cpu().tolist())) for part, n in zip(parts, lengths, strict=True)]


def any_rank(mine: bool, device: torch.device) -> bool:
    """Whether `mine` is true on any rank; the same result on all."""
    if dist.get_world_size() == 1:
        return mine
    flag = torch.tensor([float(mine)], device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())
