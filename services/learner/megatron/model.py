"""Models of this rank: a part of a Megatron GPTModel that computes its output only where a response token is predicted.

actor      logits   gradient buffers, optimizer
critic     values   gradient buffers, optimizer
reference  logits   weights only
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
)

from services.common.errors import ModelError
from services.common.spec.job import JobSpec
from services.common.spec.learner import LearnerSpec, Recompute
from services.common.spec.rollout import DType
from services.learner.megatron.bridges import open_bridge
from services.learner.training.batch import MicroBatch
from services.learner.training.dtypes import torch_dtype
from services.learner.training.layout import Layout
from services.learner.training.tensor_file import Weights
from services.learner.training.value_head import ValueHead

_RECOMPUTE: dict[Recompute, dict[str, Any]] = {
    Recompute.NONE: {},
    Recompute.SELECTIVE: {"recompute_granularity": "selective", "recompute_modules": ["mlp", "moe"]},
    Recompute.FULL: {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
"""Fields of Megatron's TransformerConfig."""


@dataclass(slots=True)
class ModelPart:
    """This rank's part of a model, and the bridge to its Hugging Face weights."""

    bridge: Any
    chunk: Any
    """The bare GPTModel of this pipeline stage."""
    model: Any
    """The same; a trained model in Megatron's wrapper: gradient buffers and their reduction."""
    selection: ResponseSelection
    rotary: RotarySelection

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        """Runs this stage: [1, R, V / TP] logits on the last one, of a value model [1, R, 1] values; else hidden states.

        Hidden states are [s, b, h], with sequence parallelism [s / TP, b, h].
        """
        self.selection.positions = batch.positions
        self.rotary.positions = batch.position_ids
        output: torch.Tensor = self.model(batch.tokens, None, batch.attention)
        return output

    @torch.no_grad()
    def own_weights(self) -> Weights:
        """The parameters themselves, by their names in this stage."""
        return {name: parameter.detach() for name, parameter in self.chunk.named_parameters()}

    @torch.no_grad()
    def take_weights(self, weights: Weights) -> None:
        """Takes over those of another part of the same place and architecture; a value head stays as it is."""
        for name, parameter in self.chunk.named_parameters():
            if not isinstance(self.chunk.get_submodule(name.rpartition(".")[0]), ValueHead):
                parameter.copy_(weights[name])

    @property
    def tied(self) -> bool:
        """Whether embedding and output layer are one tensor."""
        return bool(self.bridge.hf_config.tie_word_embeddings)


@dataclass(slots=True)
class ResponseSelection:
    """Hook before the output layer: keeps the requested positions. With a large vocabulary the logits are most of the work."""

    in_float32: bool = False
    """Whether the layer computes in float32, from its rounded input and weight."""
    is_split: bool = False
    """Whether the positions are split over the tensor-parallel ranks."""
    positions: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """int64 [R], into the flattened [s · b]."""

    def __call__(
        self, layer: torch.nn.Module, args: tuple[torch.Tensor, ...], named: dict[str, Any]
    ) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        """[s, b, h], or split [s / TP, b, h] → [R, 1, h]."""
        hidden, *rest = args
        if self.is_split:
            # The layer sums its input's gradient over the ranks: each takes the part of its positions.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        chosen = hidden.flatten(0, 1).index_select(0, self.positions)[:, None]
        if not self.in_float32:
            return (chosen, *rest), named
        # `named` has the embedding's weight where they are tied.
        weight = layer.weight if named.get("weight") is None else named["weight"]
        return (chosen.float(), *rest), named | {"weight": weight.float()}


@dataclass(slots=True)
class RotarySelection:
    """Hook after the rotary embedding: the angles of the rank's positions, where these do not count through the row."""

    positions: torch.Tensor | None = None
    """int64 [s]."""

    def __call__(self, _: torch.nn.Module, __: tuple[Any, ...], angles: torch.Tensor) -> torch.Tensor:
        """[s, 1, 1, rotary size], in the order of `positions`."""
        return angles if self.positions is None else angles.index_select(0, self.positions)


def build_policy(model_dir: Path, spec: JobSpec, layout: Layout, *, trained: bool = True) -> ModelPart:
    """Builds this rank's part and loads its weights; ModelError if this layout cannot train it, or tensors are missing."""
    part = _build(model_dir, spec, layout)
    part.selection.in_float32 = spec.model.fp32_output_layer
    if layout.is_last_stage and part.selection.is_split:
        # It receives the chosen positions of all ranks.
        part.chunk.output_layer.sequence_parallel, part.chunk.output_layer.allreduce_dgrad = False, True
    return _finish(part, model_dir, spec, trained=trained)


def build_value_model(model_dir: Path, spec: JobSpec, layout: Layout) -> ModelPart:
    """The same with a scalar head, whose values are 0 at first, in place of the output layer."""
    part = _build(model_dir, spec, layout, tied=False)
    head = ValueHead(part.bridge.config.hidden_size) if layout.is_last_stage else None
    part.chunk.output_layer = None  # so that its weights are not looked for
    return _finish(part, model_dir, spec, trained=True, head=head)


def _build(model_dir: Path, spec: JobSpec, layout: Layout, *, tied: bool | None = None) -> ModelPart:
    """The bare part, without weights; `tied` replaces what config.json says of embedding and output layer."""
    bridge = open_bridge(
        model_dir, layout, torch_dtype(spec.model.dtype), transformer_settings(spec.learner), tied=tied
    )
    provider = bridge._model_provider([])  # noqa: SLF001  its public get_model prints, and wraps in its own way
    chunk = provider(pre_process=layout.is_first_stage, post_process=layout.is_last_stage)
    return ModelPart(
        bridge, chunk, chunk, ResponseSelection(is_split=spec.learner.sequence_parallel), RotarySelection()
    )


def _finish(
    part: ModelPart, model_dir: Path, spec: JobSpec, *, trained: bool, head: ValueHead | None = None
) -> ModelPart:
    """Loads the weights, puts the head on, if any, and wraps the part."""
    chunk, config = part.chunk, part.bridge.config
    for parameter in chunk.parameters():
        set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    chunk.cuda(torch.cuda.current_device())
    load_weights(part, model_dir)
    if head is not None:
        set_defaults_if_not_set_tensor_model_parallel_attributes(head.weight)
        chunk.output_layer = head.to(device=torch.cuda.current_device(), dtype=torch_dtype(spec.model.dtype))
    if getattr(chunk, "output_layer", None) is not None:
        chunk.output_layer.register_forward_pre_hook(part.selection, with_kwargs=True)
    chunk.rotary_pos_emb.register_forward_hook(part.rotary)
    if config.context_parallel_size > 1:
        chunk.rotary_pos_emb.register_forward_pre_hook(_of_whole_row, with_kwargs=True)
    # Megatron's Float16Module would copy the logits to float32: they are read as they are.
    part.model = chunk.bfloat16() if spec.model.dtype is DType.BFLOAT16 else chunk
    if trained:
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=spec.learner.use_distributed_optimizer,
            overlap_grad_reduce=False,
        )
        part.model = DistributedDataParallel(config, ddp_config, part.model, disable_bucketing=True)
        config.finalize_model_grads_func = finalize_model_grads
    return part


def load_weights(part: ModelPart, model_dir: Path) -> None:
    """Reads this rank's part of the safetensors; ModelError if tensors are missing, or not of config.json's shapes."""
    try:
        with torch.no_grad():
            part.bridge.load_weights([part.chunk], str(model_dir))
    except (KeyError, ValueError, RuntimeError) as error:
        raise ModelError(f"{model_dir}: its weights do not fit its config.json: {error}") from error


def transformer_settings(spec: LearnerSpec) -> dict[str, Any]:
    """Settings of Megatron's TransformerConfig that differ from mbridge's, the same on every platform."""
    return {
        "use_cpu_initialization": True,
        "init_method": _unchanged,  # every weight is loaded: random initialisation would only take time
        "output_layer_init_method": _unchanged,
        "sequence_parallel": spec.sequence_parallel,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "calculate_per_token_loss": True,  # micro-batches return sums; Megatron divides by the tokens of the global batch
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "moe_aux_loss_coeff": spec.router_aux_loss_coef,
        **_RECOMPUTE[spec.recompute],
    }


def _of_whole_row(
    _: torch.nn.Module, args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Hook before the rotary embedding: the angles of the whole row, of which Megatron would choose a context-parallel rank's itself."""
    return args, named | {"packed_seq": True}


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
