"""Megatron's parallel groups."""

from __future__ import annotations

import torch.distributed as dist
from megatron.core import parallel_state

from services.common.errors import ConfigError
from services.common.spec.learner import LearnerSpec
from services.learner.training.layout import Layout


def join(spec: LearnerSpec) -> Layout:
    """Divides the joined ranks into Megatron's groups.

    Raises:
        ConfigError: the number of ranks does not divide.
    """
    tp_size, pp_size, cp_size = spec.tensor_parallel_size, spec.pipeline_parallel_size, spec.context_parallel_size
    world_size = dist.get_world_size()
    if world_size % (tp_size * pp_size * cp_size):
        sizes = f"tensor_parallel_size {tp_size} × pipeline_parallel_size {pp_size} × context_parallel_size {cp_size}"
        raise ConfigError(f"{world_size} ranks cannot be split into {sizes}")
    replicas = world_size // (tp_size * pp_size)
    if replicas % spec.expert_parallel_size:
        raise ConfigError(f"{replicas} ranks cannot share experts in expert_parallel_size {spec.expert_parallel_size}")
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tp_size,
            pp_size,
            context_parallel_size=cp_size,
            expert_model_parallel_size=spec.expert_parallel_size,
            create_gloo_process_groups=False,
        )
    return Layout(
        rank=dist.get_rank(),
        tp_size=tp_size,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp_size=pp_size,
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        dp_size=world_size // (tp_size * pp_size * cp_size),
        dp_rank=parallel_state.get_data_parallel_rank(),
        cp_size=cp_size,
        cp_rank=parallel_state.get_context_parallel_rank(),
        ep_size=spec.expert_parallel_size,
    )
