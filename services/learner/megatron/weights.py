"""Weights of the policy under their Hugging Face names, gathered over TP, PP and EP on rank 0."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from services.common.models.weight_files import EMBEDDING, LM_HEAD
from services.learner.megatron.experts import is_expert
from services.learner.megatron.model import ModelPart
from services.learner.training.collectives import gather_json
from services.learner.training.layout import Layout
from services.learner.training.tensor_file import Weights


class Exporter:
    """Gathers the weights; every rank calls `gather` at the same time."""

    def __init__(self, policy: ModelPart, layout: Layout, device: torch.device) -> None:
        """Gathers the names and shapes of every stage's weights on every rank."""
        self._policy, self._layout, self._device = policy, layout, device
        names = policy.bridge._weight_name_mapping_mcore_local_to_global(policy.chunk)  # noqa: SLF001
        self._parameters = [
            (names[name], parameter)
            for name, parameter in policy.chunk.named_parameters()
            # with tied embeddings the last stage keeps a second copy of the first one's
            if not (policy.tied and name == "output_layer.weight")
            and (layout.is_first_with_experts if is_expert(name) else layout.is_first_replica)
        ]
        mine = [[name, list(self._whole_shape(p))] for name, p in self._parameters] if layout.tp_rank == 0 else []
        self._senders: list[list[tuple[str, list[int]]]] = gather_json(mine, device)

    def gather(self, dtype: torch.dtype | None, *, copy: bool = True) -> Weights | None:
        """The weights on rank 0; None on the other ranks. Without `copy` some are the parameters themselves, on a CPU.

        `dtype` None keeps that of the parameters; a cast to it is the only change to a weight. `lm_head.weight` is always included:
        otherwise an engine that packs its output layer would keep sampling with a stale one.
        """
        merged = self._merged(dtype)
        if self._layout.rank != 0:
            for _, tensor in merged:
                if self._layout.tp_rank == 0:
                    dist.send(tensor.contiguous(), dst=0)
            return None
        weights: Weights = {}
        for rank, entries in enumerate(self._senders):
            if rank == 0:
                for name, tensor in merged:
                    self._add(weights, name, tensor, copy=copy)
                continue
            for name, shape in entries:
                tensor = torch.empty(shape, dtype=dtype or self._policy.bridge.dtype, device=self._device)
                dist.recv(tensor, src=rank)
                self._add(weights, name, tensor, copy=False)
        if self._policy.tied:
            weights[LM_HEAD] = weights[EMBEDDING].clone() if copy else weights[EMBEDDING]
        return weights

    def _add(self, weights: Weights, name: str, tensor: torch.Tensor, *, copy: bool) -> None:
        for hf_name, value in zip(*self._policy.bridge._weight_to_hf_format(name, tensor), strict=True):  # noqa: SLF001
            weights[hf_name] = value.detach().to("cpu", copy=copy).contiguous()

    def _merged(self, dtype: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
        """The parameters that this rank is the first to hold, merged over its tensor-parallel ranks."""
        group = parallel_state.get_tensor_model_parallel_group()
        for name, parameter in self._parameters:
            shard = parameter.detach() if dtype is None else parameter.detach().to(dtype)
            if self._layout.tp_size == 1 or not parameter.tensor_model_parallel:
                yield name, shard
                continue
            shards = [torch.empty_like(shard) for _ in range(self._layout.tp_size)]
            dist.all_gather(shards, shard.contiguous(), group=group)
            yield name, self._policy.bridge._weight_merge_across_tp(name, shards, parameter)  # noqa: SLF001

    def _whole_shape(self, parameter: torch.Tensor) -> torch.Size:
        if self._layout.tp_size == 1 or not parameter.tensor_model_parallel:  # type: ignore[attr-defined]
            return parameter.shape
        shape = list(parameter.shape)
        shape[parameter.partition_dim] *= self._layout.tp_size  # type: ignore[attr-defined]
        return torch.Size(shape)
