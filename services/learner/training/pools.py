"""Pools: the ranks of a job, divided by the roles that they hold.

    pool 0    the actor, and every role that shares its ranks    a world of torch.distributed
    pool 1    a role with ranks of its own                       another
              └──────── all ranks of all pools: gloo, in host memory ────────┘

Within a pool everything is as if there were no other: a back end knows the ranks of its own pool only. All pools have as many ranks, in the
same layout, and every rank of every pool makes the same calls in the same order.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from services.common.config.settings import COLLECTIVE_TIMEOUT_S, Platform
from services.learner.training.collectives import gather_json
from services.learner.training.platform import BACKENDS, device_of
from services.learner.training.rendezvous import HostGroup, join_process_group
from services.learner.training.tensor_file import Weights

ACTOR = ""
"""The actor's name among the roles."""
_TAG = 0


@dataclass(frozen=True, slots=True)
class Pools:
    """This rank's place among all pools."""

    roles: Sequence[Sequence[str]]
    """Of each pool, the roles that it holds; the actor is the first of pool 0."""
    index: int
    """This rank's pool."""
    device: torch.device
    between: HostGroup | None = None
    """All ranks, pool after pool; None where there is only one pool."""

    @property
    def name(self) -> str:
        """What this pool's files in a checkpoint begin with: its role, or nothing for the actor's."""
        return self.roles[self.index][0]

    @property
    def alone(self) -> bool:
        """Whether there is no other rank."""
        return self.between is None and dist.get_world_size() == 1

    @property
    def leads(self) -> bool:
        """Whether this rank is the first of all."""
        return self.index == 0 and dist.get_rank() == 0

    def holds(self, role: str) -> bool:
        """Whether this rank has a part of this role's model."""
        return role in self.roles[self.index]

    def column(self, role: str, own: torch.Tensor | None, length: int) -> torch.Tensor:
        """The role's float32 [length], which each of its ranks has as `own`, on every rank."""
        if self.between is None:
            assert own is not None  # noqa: S101  the only pool holds every role
            return own
        values = torch.empty(length) if own is None else own.cpu()
        return self._broadcast(values, self._first(role)).to(self.device)

    def shared(self, role: str, own: Any) -> Any:  # noqa: ANN401  any JSON value
        """The role's JSON value, which each of its ranks has as `own`, on every rank."""
        if self.between is None:
            return own
        payload = self.broadcast(json.dumps(own).encode() if self.holds(role) else None, role)
        return json.loads(payload)

    def gathered(self, value: Any) -> list[Any]:  # noqa: ANN401
        """Every rank's JSON value, on every rank, pool after pool."""
        mine = gather_json(value, self.device)
        return [item for roles in self.roles for item in self.shared(roles[0], mine)]

    def broadcast(self, payload: bytes | None, role: str = ACTOR) -> bytes:
        """The payload of the first rank of the role's pool, on every rank; the others' is not read."""
        first, own = self._first(role), payload or b""
        is_first = self._first(self.name) + dist.get_rank() == first
        size = int(self._broadcast(torch.tensor([len(own)]), first).item())
        data = np.frombuffer(bytearray(own), np.uint8) if is_first else np.empty(size, np.uint8)
        sent = self._broadcast(torch.from_numpy(data), first)
        return own if is_first else sent.numpy().tobytes()

    def send(self, weights: Weights, role: str) -> None:
        """From an actor's rank its weights to the rank of the same place in the role's pool, which calls `receive`."""
        rank = self._first(role) + dist.get_rank()
        described = [
            [name, str(value.dtype).removeprefix("torch."), list(value.shape)] for name, value in weights.items()
        ]
        header = torch.from_numpy(np.frombuffer(bytearray(json.dumps(described).encode()), np.uint8))
        for message in (torch.tensor([len(header)]), header, *weights.values()):
            self._group.send([message.detach().cpu().contiguous()], rank, _TAG).wait()

    def receive(self) -> Weights:
        """The weights that the actor's rank of this place sends, in host memory."""
        (length,) = self._received([1], torch.int64).tolist()
        described = json.loads(self._received([length], torch.uint8).numpy().tobytes())
        return {name: self._received(shape, getattr(torch, dtype)) for name, dtype, shape in described}

    def _received(self, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
        message = torch.empty(shape, dtype=dtype)
        self._group.recv([message], dist.get_rank(), _TAG).wait()
        return message

    def _first(self, role: str) -> int:
        """The first rank of the role's pool, among all ranks."""
        return next(index for index, roles in enumerate(self.roles) if role in roles) * dist.get_world_size()

    def _broadcast(self, values: torch.Tensor, root: int) -> torch.Tensor:
        """`values` of this rank, in host memory, on every rank."""
        if self.between is not None:
            self.between.broadcast(values, root).wait()
        elif dist.get_world_size() > 1:
            values = values.to(self.device)
            dist.broadcast(values, root)
        return values.cpu()

    @property
    def _group(self) -> HostGroup:
        if self.between is None:
            raise ValueError("there is one pool")
        return self.between


def join_ranks(roles: Sequence[Sequence[str]], platform: Platform) -> Pools:
    """Joins the ranks that the launcher's environment names; without a launcher: a group of one.

    Raises:
        ConfigError: they cannot be divided into so many pools.
    """
    joined = join_process_group(BACKENDS[platform], timedelta(seconds=COLLECTIVE_TIMEOUT_S), len(roles))
    return Pools(roles, joined.pool, device_of(platform), joined.between)
