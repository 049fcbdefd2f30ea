"""Bridges of mbridge, Hugging Face ↔ Megatron, for Megatron's local layer spec: no Transformer Engine, on any platform."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import AutoConfig

from services.common.errors import ModelError
from services.common.models.config import check_trainable, rope_parameters
from services.common.models.directory import expert_sizes
from services.common.models.weight_files import EMBEDDING
from services.learner.megatron.attention import PackedCoreAttention
from services.learner.megatron.experts import Router, is_expert, shift_experts
from services.learner.megatron.mbridge_models import LLaMABridge, Qwen2Bridge, Qwen3Bridge
from services.learner.training.layout import Layout

_LAYER = "model.layers.{layer_number}"


class SequenceParallelNorm(torch.nn.RMSNorm):
    """RMSNorm of rows whose positions are split over the tensor-parallel ranks, which Megatron's own without Transformer Engine refuses.

    Every rank holds the whole weight and has the gradient of its own positions: `finalize_model_grads` sums those of marked parameters.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        """The norm over `hidden_size`; Megatron's other arguments repeat its config."""
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class _LocalSpec:
    """Mixin of a bridge: what differs with the local layer spec, and what transformers 5 moved."""

    hf_config: Any
    config: Any
    _DIRECT_MAPPING: dict[str, str]

    _OTHER_MAPPING = {"input_layernorm.weight": [f"{_LAYER}.input_layernorm.weight"]}  # noqa: RUF012  as in the base
    _MLP_MAPPING = {  # noqa: RUF012
        "pre_mlp_layernorm.weight": [f"{_LAYER}.post_attention_layernorm.weight"],
        "mlp.linear_fc1.weight": [f"{_LAYER}.mlp.gate_proj.weight", f"{_LAYER}.mlp.up_proj.weight"],
        "mlp.linear_fc2.weight": [f"{_LAYER}.mlp.down_proj.weight"],
    }

    def _adjust_mapping_for_shared_weights(self) -> None:
        """Keeps the mapping in this instance: the base class changes its class's, and so that of every later model."""
        self._DIRECT_MAPPING = dict(self._DIRECT_MAPPING)
        if self.hf_config.tie_word_embeddings:
            self._DIRECT_MAPPING["output_layer.weight"] = EMBEDDING

    def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> Any:  # noqa: ANN401, ARG002
        spec = get_gpt_layer_local_spec(
            self.config.num_moe_experts, qk_layernorm=self.config.qk_layernorm, normalization="RMSNorm"
        )
        layer, attention = spec.submodules, spec.submodules.self_attention.submodules
        attention.core_attention = PackedCoreAttention
        if self.config.num_moe_experts is not None:
            layer.mlp.submodules.router = Router
        if not self.config.sequence_parallel:
            return spec
        layer.input_layernorm = layer.pre_mlp_layernorm = SequenceParallelNorm
        if self.config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = SequenceParallelNorm
        layers = [spec] * get_num_layers_to_build(self.config)
        return TransformerBlockSubmodules(layer_specs=layers, layer_norm=SequenceParallelNorm)

    def _get_gptmodel_args(self) -> dict[str, Any]:
        return {
            "vocab_size": self.hf_config.vocab_size,
            "max_sequence_length": self.hf_config.max_position_embeddings,
            "position_embedding_type": "rope",
            **rope_arguments(self.hf_config),
        }


class LocalLlamaBridge(_LocalSpec, LLaMABridge):  # type: ignore[misc]  # mbridge comes without types
    """Llama and models of its layout (SmolLM2, TinyLlama)."""


class LocalQwen2Bridge(_LocalSpec, Qwen2Bridge):  # type: ignore[misc]
    """Qwen2 and Qwen2.5: biases on query, key and value."""


class LocalQwen3Bridge(_LocalSpec, Qwen3Bridge):  # type: ignore[misc]
    """Qwen3 (dense): norms on query and key."""


class _LocalExperts(_LocalSpec):
    """Mixin of a bridge of a mixture of experts: an expert's weights are its own, and have its number in all ranks' names."""

    mpu: Any
    _EXPERT: str
    """A tensor of an expert in a Hugging Face directory."""
    _PROJECTIONS: dict[str, tuple[str, ...]]
    """Megatron's name of a layer of an expert → those of Hugging Face."""
    _ROUTER: str

    def _weight_name_mapping_mcore_local_to_global(
        self, model: torch.nn.Module, consider_ep: bool = True
    ) -> dict[str, str]:
        names: dict[str, str] = super()._weight_name_mapping_mcore_local_to_global(model, consider_ep=False)  # type: ignore[misc]
        before = self.mpu.ep_rank * (self.config.num_moe_experts // self.mpu.ep_size) if consider_ep else 0
        return {local: shift_experts(name, before) for local, name in names.items()}

    def _weight_name_mapping_mlp(self, name: str) -> list[str]:
        layer = name.split(".")[2]
        if name.endswith("mlp.router.weight"):
            return [f"model.layers.{layer}.{self._ROUTER}.weight"]
        if not is_expert(name):
            return list(super()._weight_name_mapping_mlp(name))  # type: ignore[misc]
        *_, expert, projection, _ = name.split(".")
        return [f"model.layers.{layer}.{self._EXPERT}.{expert}.{part}.weight" for part in self._PROJECTIONS[projection]]

    def _build_base_config(self, **settings: Any) -> Any:  # noqa: ANN401
        number, width = expert_sizes(Path("config.json"), self.hf_config.to_dict())
        experts = {
            "num_moe_experts": number,
            "moe_ffn_hidden_size": width,
            "moe_router_topk": self.hf_config.num_experts_per_tok,
            # Probabilities of the chosen experts that are scaled to a sum of 1 are a softmax of these alone.
            "moe_router_pre_softmax": not getattr(self.hf_config, "norm_topk_prob", True),
            "moe_router_load_balancing_type": "none",  # `Router` has the loss, with Megatron's coefficient
        }
        return super()._build_base_config(**settings | experts)  # type: ignore[misc]


class LocalQwen3MoEBridge(_LocalExperts, Qwen3Bridge):  # type: ignore[misc]
    """Qwen3 with experts in every layer; mbridge's own takes the experts' weights to be scaled, whatever config.json says."""

    _EXPERT, _ROUTER = "mlp.experts", "mlp.gate"
    _PROJECTIONS = {"linear_fc1": ("gate_proj", "up_proj"), "linear_fc2": ("down_proj",)}  # noqa: RUF012


class LocalMixtralBridge(_LocalExperts, LLaMABridge):  # type: ignore[misc]
    """Mixtral: Llama with experts; mbridge's own does not scale the experts' weights."""

    _EXPERT, _ROUTER = "block_sparse_moe.experts", "block_sparse_moe.gate"
    _PROJECTIONS = {"linear_fc1": ("w1", "w3"), "linear_fc2": ("w2",)}  # noqa: RUF012


_BRIDGES: dict[str, Any] = {
    "llama": LocalLlamaBridge,
    "qwen2": LocalQwen2Bridge,
    "qwen3": LocalQwen3Bridge,
    "qwen3_moe": LocalQwen3MoEBridge,
    "mixtral": LocalMixtralBridge,
}


def open_bridge(
    model_dir: Path, layout: Layout, dtype: torch.dtype, overrides: dict[str, Any], *, tied: bool | None = None
) -> Any:  # noqa: ANN401
    """The bridge for a Hugging Face directory with config.json and safetensors; the arguments are those of `make_bridge`.

    Raises:
        ModelError: the directory has no model that can be trained here, or its sizes do not divide; names the reason.
    """
    hf_config = read_config(model_dir)
    if not any(model_dir.glob("*.safetensors")):
        raise ModelError(f"{model_dir}: no safetensors file")
    check_model(hf_config, model_dir, layout)
    return make_bridge(hf_config, dtype, overrides, tied=tied)


def read_config(model_dir: Path) -> Any:  # noqa: ANN401  transformers comes without types
    """What transformers makes of config.json. Raises ModelError if there is no bridge for its model_type."""
    try:
        hf_config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ModelError(f"{model_dir}: {error}") from error
    if hf_config.model_type not in _BRIDGES:
        known = ", ".join(sorted(_BRIDGES))
        raise ModelError(f"{model_dir}: model_type {hf_config.model_type!r} cannot be trained (can be: {known})")
    return hf_config


def make_bridge(hf_config: Any, dtype: torch.dtype, overrides: dict[str, Any], *, tied: bool | None = None) -> Any:  # noqa: ANN401
    """The bridge of a config; `overrides`: fields of Megatron's TransformerConfig.

    `tied`: whether embedding and output layer are one tensor, in place of what the config says.
    """
    if tied is not None:
        hf_config.tie_word_embeddings = tied
    if getattr(hf_config, "head_dim", 0) is None:  # as Mixtral's, which mbridge does not expect
        hf_config.head_dim = hf_config.hidden_size // hf_config.num_attention_heads
    bridge = _BRIDGES[hf_config.model_type](hf_config, dtype=dtype)
    bridge.set_extra_args(**overrides)
    return bridge


def check_model(hf_config: Any, model_dir: Path, layout: Layout) -> None:  # noqa: ANN401  transformers comes without types
    """Refuses a model that would be trained wrongly, or not at all: ModelError names the key of config.json."""
    check_trainable(hf_config, str(model_dir))
    experts, width = expert_sizes(model_dir / "config.json", hf_config.to_dict())
    divided = {
        "vocab_size": ("tensor_parallel_size", layout.tp_size),
        "num_attention_heads": ("tensor_parallel_size", layout.tp_size),
        "num_key_value_heads": ("tensor_parallel_size", layout.tp_size),
        "intermediate_size": ("tensor_parallel_size", layout.tp_size),
        "num_hidden_layers": ("pipeline_parallel_size", layout.pp_size),
    }
    sizes = {key: getattr(hf_config, key) for key in divided}
    if experts:
        sizes["intermediate_size"], sizes["number of experts"] = width, experts
        divided["number of experts"] = ("expert_parallel_size", layout.ep_size)
        if layout.tp_size > 1:
            raise ModelError(f"{model_dir}: it has experts: tensor_parallel_size must be 1, and not {layout.tp_size}")
    elif layout.ep_size > 1:
        raise ModelError(f"{model_dir}: it has no experts, and expert_parallel_size is {layout.ep_size}")
    for key, (name, size) in divided.items():
        if sizes[key] % size:
            raise ModelError(f"{model_dir}: {key} = {sizes[key]} is not divisible by {name} = {size}")


def rope_arguments(hf_config: Any) -> dict[str, Any]:  # noqa: ANN401
    """GPTModel's arguments for the model's rotary embedding; ModelError if Megatron does not have it."""
    rope = rope_parameters(hf_config, "config.json")
    base = {"rotary_base": rope["rope_theta"]}
    match rope["rope_type"]:
        case "linear":
            return base | {"seq_len_interpolation_factor": rope["factor"]}
        case "llama3":
            return base | {"rope_scaling": True, "rope_scaling_factor": rope["factor"]}
        case _:
            return base
