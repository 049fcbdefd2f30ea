"""Megatron back end: a job's models as parts of Megatron GPTModels, over tensor, pipeline and data parallelism."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.parallel_state import (
    get_context_parallel_group,
    get_data_parallel_group,
    get_tensor_model_parallel_group,
)
from megatron.core.pipeline_parallel import get_forward_backward_func

from services.common.config.settings import Platform
from services.common.spec.job import JobSpec
from services.common.spec.learner import OptimizerFields
from services.learner.megatron.experts import Router, router_figures, routers_of
from services.learner.megatron.model import ModelPart, build_policy, build_value_model, load_weights
from services.learner.megatron.optimizer import Optimizer
from services.learner.megatron.parallel import join
from services.learner.megatron.platform import seed_tensor_parallel
from services.learner.megatron.role import Role
from services.learner.megatron.state import RankState
from services.learner.megatron.weights import Exporter
from services.learner.training.backend import LoadedState, OnOutput, StateCopy
from services.learner.training.batch import MicroBatch, RowForm
from services.learner.training.dtypes import torch_dtype
from services.learner.training.layout import Layout
from services.learner.training.platform import device_of, seed_all
from services.learner.training.pools import join_ranks
from services.learner.training.tensor_file import Weights


class MegatronBackend:
    """This rank's part of all models; `training.backend.Backend` describes the methods.

    Call `platform.prepare` before this module is imported.
    """

    def __init__(self, spec: JobSpec, platform: Platform) -> None:
        """Joins the other ranks; ConfigError if they cannot be split as the spec says."""
        self._spec, self._platform = spec, platform
        self.pools = join_ranks(spec.pools, platform)
        self.layout = join(spec.learner)
        self.device = device_of(platform)
        self._roles: list[Role] = []
        seed_all(spec.learner.seed + self.layout.rank)
        if spec.learner.sequence_parallel:
            seed_tensor_parallel(spec.learner.seed)

    @property
    def vocabulary_group(self) -> dist.ProcessGroup | None:
        """The tensor-parallel ranks."""
        group: dist.ProcessGroup = get_tensor_model_parallel_group()
        return group if self.layout.tp_size > 1 else None

    @property
    def context_group(self) -> dist.ProcessGroup | None:
        """The context-parallel ranks."""
        group: dist.ProcessGroup = get_context_parallel_group()
        return group if self.layout.cp_size > 1 else None

    @property
    def row_form(self) -> RowForm:
        """Context parallelism divides one row of segments."""
        return RowForm.JOINED if self.layout.cp_size > 1 else RowForm.PADDED

    def policy(self, role: str, model_dir: Path, optimizer: OptimizerFields | None) -> MegatronModel:
        """A policy of this place."""
        part = build_policy(model_dir, self._spec, self.layout, trained=optimizer is not None)
        return self._keep(role, part, optimizer)

    def value_model(self, role: str, model_dir: Path, optimizer: OptimizerFields) -> MegatronModel:
        """A value model of this place."""
        return self._keep(role, build_value_model(model_dir, self._spec, self.layout), optimizer)

    def copy_state(self, step: int, kl_coefficient: float | None) -> StateCopy:
        """This rank's file of a checkpoint."""
        return self._state.copy(step, kl_coefficient)

    def load_state(self, folder: Path, *, optimizer: bool = True, rng: bool = True) -> LoadedState:
        """Reads it, or from the files of another layout what would be in it."""
        return self._state.load(folder, optimizer=optimizer, rng=rng)

    @property
    def _state(self) -> RankState:
        return RankState(self._spec, self._platform, self.layout, self.pools.name, self._roles)

    def _keep(self, name: str, part: ModelPart, fields: OptimizerFields | None) -> MegatronModel:
        optimizer = None
        if fields is not None:
            dtype, distributed = torch_dtype(self._spec.model.dtype), self._spec.learner.use_distributed_optimizer
            optimizer = Optimizer(fields, dtype, part.model, distributed=distributed)
        self._roles.append(Role(name, part, optimizer))
        return MegatronModel(part, optimizer, self.layout, self.device, routers_of(part.chunk))


@dataclass
class MegatronModel:
    """This rank's part of the model of one role; `training.backend.Model` describes the methods."""

    part: ModelPart
    _optimizer: Optimizer | None
    _layout: Layout
    _device: torch.device
    _routers: list[Router]

    def parameters(self) -> Iterable[torch.Tensor]:
        """Those of this pipeline stage."""
        return self.part.chunk.parameters()  # type: ignore[no-any-return]

    @property
    def optimizer(self) -> Optimizer:
        """Megatron's."""
        if self._optimizer is None:
            raise ValueError("the model is not trained")
        return self._optimizer

    def run(self, micro_batches: Sequence[MicroBatch], on_output: OnOutput, *, forward_only: bool) -> None:
        """Runs Megatron's schedule: pipelined where there are stages; gradients are reduced at the end."""
        if not forward_only and self.part.bridge.config.moe_aux_loss_coeff:
            self._scale_router_loss(micro_batches)

        def forward_step(batches: Iterator[MicroBatch], _: object) -> tuple[torch.Tensor, Callable[..., Any]]:
            micro_batch = next(batches)

            def loss_of(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
                loss, tokens = on_output(micro_batch, output[0])
                # context-parallel ranks have the same tokens, each with the gradient of its own
                return loss, tokens if self._layout.cp_rank == 0 else torch.zeros_like(tokens), {}

            return self.part.forward(micro_batch), loss_of

        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(micro_batches),
            model=[self.part.model],
            num_microbatches=len(micro_batches),
            seq_length=max(micro_batch.tokens.shape[1] for micro_batch in micro_batches),
            micro_batch_size=1,  # stages send shapes with the tensors; this and `seq_length` are ignored
            forward_only=forward_only,
        )

    def own_weights(self) -> Weights:
        """Those of this pipeline stage."""
        return self.part.own_weights()

    def take_weights(self, weights: Weights) -> None:
        """Parameter by parameter."""
        self.part.take_weights(weights)

    def load_weights(self, model_dir: Path) -> None:
        """By the bridge."""
        load_weights(self.part, model_dir)

    def gather(self, dtype: torch.dtype | None, *, copy: bool = True) -> Weights | None:
        """Over TP and PP."""
        return self._exporter.gather(dtype, copy=copy)

    def adapter(self, base_model: str) -> None:
        """Has none."""

    def figures(self) -> dict[str, float]:
        """Those of routers."""
        config = self.part.bridge.config
        if config.num_moe_experts is None:
            return {}
        return router_figures(self._routers, config.num_layers, config.num_moe_experts, self._device)

    def _scale_router_loss(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Tells the routers the batch's trained tokens per position."""
        tokens = sum(int(batch.loss_mask.sum()) for batch in micro_batches) if self._layout.cp_rank == 0 else 0
        positions = sum(batch.tokens.numel() for batch in micro_batches)
        totals = torch.tensor([float(tokens), float(positions)], device=self._device)
        dist.all_reduce(totals, group=get_data_parallel_group(with_context_parallel=True))
        for router in self._routers:
            router.tokens_per_position = float(totals[0] / totals[1])

    @cached_property
    def _exporter(self) -> Exporter:
        return Exporter(self.part, self._layout, self._device)
