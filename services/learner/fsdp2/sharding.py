"""Sharding: this rank's rows of every parameter. fully_shard divides the first dimension, as torch.chunk does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


@dataclass(frozen=True, slots=True)
class Shards:
    """The ranks that hold one copy of the weights between them, and this rank's place among them."""

    mesh: DeviceMesh
    size: int
    index: int

    @classmethod
    def of(cls, device: torch.device, world_size: int, rank: int, size: int | None) -> Shards:
        """All ranks, or with `size` so many, next to each other; the others hold copies."""
        size = world_size if size is None else size
        if size == world_size:
            return cls(init_device_mesh(device.type, (size,)), size, rank)
        names = ("replicate", "shard")
        mesh = init_device_mesh(device.type, (world_size // size, size), mesh_dim_names=names)
        return cls(mesh, size, rank % size)

    @property
    def group(self) -> torch.distributed.ProcessGroup:
        """The ranks of this copy."""
        return self.mesh.get_group(self.mesh.ndim - 1)

    def rows(self, count: int) -> slice:
        """This rank's of a first dimension of `count`."""
        return rows_of(self.index, self.size, count)

    def shard(
        self, root: torch.nn.Module, layers: Iterable[torch.nn.Module], compute_dtype: torch.dtype | None
    ) -> None:
        """Shards the layers, each gathered when it is computed, and the rest of the root with it.

        With `compute_dtype` the float32 weights are computed in that; their gradients are summed over the ranks in float32.
        """
        policy = MixedPrecisionPolicy(
            param_dtype=compute_dtype, reduce_dtype=None if compute_dtype is None else torch.float32
        )
        for module in (*layers, root):
            sharded = fully_shard(module, mesh=self.mesh, mp_policy=policy)
            assert isinstance(sharded, FSDPModule)  # noqa: S101  fully_shard changes the class
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)


def rows_of(index: int, size: int, count: int) -> slice:
    """The rows of one of `size` ranks."""
    each = -(-count // size)
    return slice(min(count, index * each), min(count, (index + 1) * each))
