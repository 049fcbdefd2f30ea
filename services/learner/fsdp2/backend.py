"""FSDP2 back end: a job's models as transformers has them, with weights, gradients and moments sharded over the data-parallel ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from services.common.config.settings import Platform
from services.common.errors import ConfigError
from services.common.spec.job import JobSpec
from services.common.spec.learner import OptimizerFields
from services.common.spec.rollout import LoraSpec
from services.learner.fsdp2 import adapters
from services.learner.fsdp2.model import FSDP2Model, PolicyModel, ValueModel, build, layers_of
from services.learner.fsdp2.optimizer import Optimizer
from services.learner.fsdp2.sharding import Shards
from services.learner.fsdp2.state import RankState
from services.learner.training.backend import LoadedState, StateCopy
from services.learner.training.batch import RowForm
from services.learner.training.dtypes import torch_dtype
from services.learner.training.layout import Layout
from services.learner.training.platform import device_of, prepare, seed_all
from services.learner.training.pools import join_ranks

CAUSAL = "causal."


class FSDP2Backend:
    """This rank's part of all models; `training.backend.Backend` describes the methods."""

    row_form = RowForm.JOINED
    vocabulary_group: dist.ProcessGroup | None = None
    context_group: dist.ProcessGroup | None = None

    def __init__(self, spec: JobSpec, platform: Platform) -> None:
        """Joins the other ranks; ConfigError if they cannot be split as the spec says."""
        prepare(platform)
        self.pools = join_ranks(spec.pools, platform)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        if world_size % (spec.learner.fsdp_size or 1):
            raise ConfigError(f"{world_size} ranks cannot be split into copies on fsdp_size {spec.learner.fsdp_size}")
        self._spec, self._platform = spec, platform
        self.layout = Layout(rank, 1, 0, 1, 0, world_size, rank)
        self.device = device_of(platform)
        self._shards = Shards.of(self.device, world_size, rank, spec.learner.fsdp_size)
        self._models: dict[str, FSDP2Model] = {}
        seed_all(spec.learner.seed + rank)

    def policy(self, role: str, model_dir: Path, optimizer: OptimizerFields | None) -> FSDP2Model:
        """A causal model."""
        lora = self._spec.model.lora if optimizer is not None else None
        causal = self._build(model_dir, is_trained=optimizer is not None and lora is None)
        if lora is not None:
            adapters.add_adapters(causal, lora, self._spec.learner.seed)
        root = PolicyModel(causal)
        tied_to = None
        if causal.get_output_embeddings().weight is causal.get_input_embeddings().weight:
            tied_to = next(name for name, p in causal.named_parameters() if p is causal.get_input_embeddings().weight)
        return self._keep(role, model_dir, root, layers_of(causal), tied_to, optimizer, lora)

    def value_model(self, role: str, model_dir: Path, optimizer: OptimizerFields) -> FSDP2Model:
        """A causal model with a scalar head."""
        causal = self._build(model_dir, is_trained=True)
        return self._keep(role, model_dir, ValueModel(causal), layers_of(causal), None, optimizer)

    def copy_state(self, step: int, kl_coefficient: float | None) -> StateCopy:
        """This rank's file of a checkpoint."""
        return self._state.copy(step, kl_coefficient)

    def load_state(self, folder: Path, *, optimizer: bool = True, rng: bool = True) -> LoadedState:
        """Reads it, or the files of another number of ranks."""
        return self._state.load(folder, optimizer=optimizer, rng=rng)

    @property
    def _state(self) -> RankState:
        return RankState(self._spec, self._platform, self.layout, self.pools.name, self._shards, self._models)

    def _build(self, model_dir: Path, *, is_trained: bool) -> Any:  # noqa: ANN401  transformers comes without types
        """Trained weights are float32 masters."""
        dtype = torch.float32 if is_trained else torch_dtype(self._spec.model.dtype)
        model, learner = self._spec.model, self._spec.learner
        return build(model_dir, dtype, fp32_output_layer=model.fp32_output_layer, recompute=learner.recompute)

    def _keep(
        self, role: str, model_dir: Path, root: torch.nn.Module, layers: list[torch.nn.Module], tied_to: str | None,
        optimizer: OptimizerFields | None, lora: LoraSpec | None = None,
    ) -> FSDP2Model:  # fmt: skip
        dtype = torch_dtype(self._spec.model.dtype)
        is_mixed = optimizer is not None and dtype is not torch.float32
        self._shards.shard(root, layers, dtype if is_mixed else None)
        model = FSDP2Model(root, _hugging_face_name, tied_to, self._shards, self.layout, self.device, dtype, lora)
        model.load_weights(model_dir)
        model.has_initial_base = True
        if optimizer is not None:
            model.own = Optimizer(optimizer, model.trained, self._shards, self.device)
        self._models[role] = model
        return model


def _hugging_face_name(name: str) -> str:
    return name.removeprefix(CAUSAL)
