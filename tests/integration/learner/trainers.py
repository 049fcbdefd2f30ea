"""Trainers of the tests' ranks, on one of the back ends, and what is asked of the inside of either.

A process has one back end: with the argument `fsdp2` that, else Megatron, for which the process is prepared here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from services.common.spec.job import JobSpec
from services.common.spec.learner import BackendName
from services.learner.algorithms.losses import LossFunction
from services.learner.backends import open_backend
from services.learner.training.actor import Actor
from services.learner.training.backend import Model
from services.learner.training.platform import BACKENDS
from services.learner.training.tensor_file import Weights
from services.learner.training.trainer import Trainer
from tests.integration.learner.platforms import PLATFORM
from tests.integration.learner.trainer_cases import ON_FSDP2 as FSDP2_LAYOUTS

ON_FSDP2 = BackendName.FSDP2.value in sys.argv
FSDP2 = BackendName.FSDP2
HEAD, LM_HEAD = "value_head.weight", "lm_head.weight"

if not ON_FSDP2:
    from services.learner.megatron.platform import prepare

    prepare(PLATFORM)


def trainer_of(
    model: Path, spec: JobSpec, loss: LossFunction, *, critic_dir: Path | None = None, reference_dir: Path | None = None
) -> Trainer:
    """This rank's trainer, on the back end that the spec names."""
    backend = open_backend(spec, PLATFORM)
    return Trainer(model, spec, backend, loss, critic_dir=critic_dir, reference_dir=reference_dir)


def actor_of(trainer: Trainer) -> Actor:
    """The policy in training, of a rank that holds it."""
    assert trainer._actor is not None
    return trainer._actor


def forget_groups() -> None:
    """Lets the next layout of this process make its own groups."""
    if ON_FSDP2:
        return
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state._POSITION_EMBEDDING_GLOBAL_RANKS = None  # which 0.12 leaves to the next layout


def run_layouts(
    root: Path,
    layouts: Mapping[str, int],
    quick: Collection[str],
    scenario: Callable[[str], dict[str, Any]],
    *,
    everything: bool,
) -> None:
    """This back end's layouts of this number of ranks, in one set of processes: starting them costs much. Rank 0 writes what came out.

    `layouts`: their ranks; `quick`: those that are run without `everything`, which runs those of slow tests too.
    """
    (root / "out").mkdir(exist_ok=True)
    if not dist.is_initialized():
        dist.init_process_group(BACKENDS[PLATFORM])
    ranks, said = dist.get_world_size(), {}
    mine = [name for name, size in layouts.items() if size == ranks and (name in FSDP2_LAYOUTS) is ON_FSDP2]
    for name in (name for name in mine if everything or name in quick):
        said[name] = scenario(name)
        forget_groups()
    if dist.get_rank() == 0:
        (root / "out" / f"{'fsdp2' if ON_FSDP2 else 'megatron'}-ranks{ranks}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


def part_of(model: Model | None) -> Any:
    """A model's part on Megatron."""
    found: Any = model
    return found.part


def roles_of(trainer: Trainer) -> Any:
    """Megatron's roles of a trainer."""
    backend: Any = trainer._backend
    return backend._roles


def leads_data() -> bool:
    """Whether this rank computes the first share of a batch."""
    if ON_FSDP2:
        return dist.get_rank() == 0
    from megatron.core import parallel_state

    return bool(parallel_state.get_data_parallel_rank() == 0)


def whole_vocabulary(trainer: Trainer, logits: torch.Tensor) -> torch.Tensor:
    """[…, V] of the ranks' parts."""
    group = trainer._backend.vocabulary_group
    if group is None:
        return logits
    parts = [torch.empty_like(logits) for _ in range(trainer.layout.tp_size)]
    dist.all_gather(parts, logits.contiguous(), group=group)
    return torch.cat(parts, -1)


def output_layer_of(trainer: Trainer) -> torch.nn.Module | None:
    """The policy's output layer; None on a rank without one."""
    model: Any = actor_of(trainer).model
    layer: torch.nn.Module | None
    if ON_FSDP2:
        layer = model._root.causal.get_output_embeddings()
    else:
        layer = model.part.chunk.output_layer if trainer.layout.is_last_stage else None
    return layer


def output_weight_of(trainer: Trainer) -> torch.Tensor:
    """This rank's part of its weight, as a step computes with it."""
    model: Any = actor_of(trainer).model
    weight: torch.Tensor
    if ON_FSDP2:
        names = model.sharded.keys()
        name = LM_HEAD if LM_HEAD in names else model._tied_to
        weight = model.sharded[name].detach().full_tensor().to(model._dtype)
    elif model.part.tied:
        weight = model.part.chunk.shared_embedding_or_output_weight()
    else:
        weight = model.part.chunk.output_layer.weight
    return weight.detach()


def gathered(model: Model) -> Weights | None:
    """A model's weights under their Hugging Face names, a critic's head as the output layer, on rank 0."""
    weights = model.gather(None)
    if weights is not None and HEAD in weights:
        weights[LM_HEAD] = weights.pop(HEAD)
    return weights


def head_of(trainer: Trainer) -> torch.Tensor | None:
    """This rank's part of the critic's head; None where it has none."""
    assert trainer._critic is not None
    model: Any = trainer._critic.model
    head: torch.Tensor | None = None
    if ON_FSDP2:
        head = model.sharded[HEAD].to_local()
    elif trainer.layout.is_last_stage:
        head = model.part.chunk.output_layer.weight
    return head


def held_parts(trainer: Trainer) -> dict[str, str]:
    """Parameter, and which part of it this rank holds → a digest: ranks that hold the same part must have the same one."""
    if ON_FSDP2:
        backend: Any = trainer._backend
        return {
            f"{role}.model.{name}, rows {backend._shards.index}": digest(parameter.to_local())
            for role, model in backend._models.items()
            for name, parameter in model.sharded.items()
        }
    found = {}
    for role in roles_of(trainer):
        for name, parameter in role.model().items():
            part = trainer.layout.tp_rank if getattr(parameter, "tensor_model_parallel", False) else 0
            found[f"{name}, stage {trainer.layout.pp_rank}, part {part}"] = digest(parameter)
    return found


def state_tensors(trainer: Trainer) -> dict[str, torch.Tensor]:
    """What a checkpoint of this rank would hold; with Megatron's names for float32 masters of a bfloat16 model, on either back end."""
    tensors = trainer._backend.copy_state(trainer.step, None).tensors
    dtype = torch.bfloat16 if trainer._spec.model.dtype.value == "bfloat16" else torch.float32
    if not ON_FSDP2 or dtype is torch.float32:
        return tensors
    masters = {
        f"{name.replace('model.', 'optimizer.', 1)}.master": tensor
        for name, tensor in tensors.items()
        if name.startswith(("model.", "critic.model."))
    }
    rounded = {
        name: tensor.to(dtype) if ".model." in f".{name}" and "optimizer." not in name else tensor
        for name, tensor in tensors.items()
    }
    return rounded | masters


def masters_follow(trainer: Trainer) -> bool:
    """Whether every float32 master weight of this rank is that of the model: rounded, it occurs there."""
    if ON_FSDP2:
        return True  # the masters are the model's weights
    for role in roles_of(trainer):
        held = torch.cat([p.detach().flatten() for p in role.chunk.parameters()])
        masters = [parameter.detach().flatten() for _, _, _, parameter in role.groups()]
        if masters and not torch.isin(torch.cat(masters).to(held.dtype), held).all():
            return False
    return True


def digest(tensor: torch.Tensor) -> str:
    """Of its bytes."""
    return xxhash.xxh3_64_hexdigest(tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
