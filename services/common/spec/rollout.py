"""Sections `model` and `rollout`: the model and its sampling."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, StringConstraints, field_validator, model_validator

from services.common.spec.base import Section
from services.common.spec.reference import check_model_path

MAX_TEMPLATE_CHARS = 131_072


class DType(StrEnum):
    """Element type of the weights, in the learner and in the engine."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    AUTO = "auto"
    """Of a spec that is submitted; an accepted job has one of the others."""


class LoraSpec(Section):
    """Section `model.lora`: low-rank adapters, of which alone the actor is trained; backend fsdp2 has them."""

    rank: int = Field(default=8, ge=1, le=1024, description="Rank r of the adapters, peft's `r`.")
    alpha: int = Field(default=16, ge=1, le=65_536, description="The adapters' product is multiplied by alpha / rank.")
    target_modules: Annotated[list[str], Field(min_length=1, max_length=64)] | None = Field(
        default=None,
        description="Names of the linear layers that get one, as in peft. All but the output layer when null.",
        examples=[["q_proj", "v_proj"]],
    )
    dropout: float = Field(
        default=0.0,
        ge=0.0,
        lt=1.0,
        description="Share of an adapter's inputs that is dropped; above 0 log-probs are noisy.",
    )


class ModelSpec(Section):
    """Section `model`."""

    path: Annotated[str, StringConstraints(min_length=1, max_length=1024)] = Field(
        description="A registered model's name, a Hugging Face directory (safetensors) under the allowed model roots, or a model of a hub: "
        "hf:ORG/NAME[@REVISION], modelscope:ORG/NAME[@REVISION]. An accepted job names the commit.",
        examples=[
            "tiny",
            "/models/Qwen2.5-7B-Instruct",
            "hf:Qwen/Qwen2.5-0.5B-Instruct",
            "modelscope:Qwen/Qwen3-0.6B@master",
        ],
    )
    dtype: DType = Field(
        default=DType.BFLOAT16,
        strict=False,
        description="Weights' type in learner and engine; bfloat16 keeps float32 masters; auto: bfloat16, but float32 on CPUs that do not "
        "multiply bfloat16.",
    )
    fp32_output_layer: bool = Field(
        default=False,
        description="Logits are computed in float32 though the model is bfloat16, in the learner and in the engine: slower, but logits "
        "rounded to bfloat16 are off by more than the clips of loss gspo allow.",
    )
    lora: LoraSpec | None = Field(
        default=None, description="Train low-rank adapters instead of the weights; absent: the weights."
    )
    max_model_len: int | None = Field(
        default=None, ge=16, le=2_000_000, description="Longest prompt + response, tokens (default: the model's)."
    )
    chat_template: Annotated[str, StringConstraints(min_length=1, max_length=MAX_TEMPLATE_CHARS)] | None = Field(
        default=None,
        description="Jinja text that writes prompts from `messages`, in place of the model's own: base models have none. "
        "`millrace submit` takes the name of a .jinja file, too, beside the job's.",
        examples=["{% for m in messages %}{{ m.content }}\n{% endfor %}"],
    )

    @field_validator("chat_template")
    @classmethod
    def _is_template(cls, value: str | None) -> str | None:
        if value is not None and "messages" not in value:
            raise ValueError(
                "must be a Jinja template of `messages`; the name of a file is taken by `millrace submit` alone"
            )
        return value

    @field_validator("path")
    @classmethod
    def _known_form(cls, value: str) -> str:
        return check_model_path(value)


class RolloutSpec(Section):
    """Section `rollout`: how groups are sampled."""

    group_size: int = Field(default=8, ge=1, le=1024, description="Rollouts per task (G).")
    temperature: float = Field(default=1.0, gt=0.0, le=5.0, description="Sampling temperature of training rollouts.")
    rollout_max_tokens: int = Field(default=512, ge=1, le=1_000_000, description="Longest response, tokens.")
    group_timeout_s: float = Field(
        default=600.0, ge=1.0, le=86_400.0, description="Deadline of a group, from issue to verdict."
    )
    rollout_timeout_s: float | None = Field(
        default=None, ge=0.1, le=86_400.0, description="Deadline of a rollout's sampling (null: the group's)."
    )
    min_group_size: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="With so many whole rollouts at the deadline a group goes on without the others, which favours short responses; "
        "with fewer it is issued again (null: group_size).",
    )
    max_attempts: int = Field(default=3, ge=1, le=20, description="Times a group is issued before it fails.")
    max_concurrent_groups: int = Field(
        default=32, ge=1, le=4096, description="Groups one rollout server samples at once."
    )
    enforce_eager: bool = Field(default=True, description="vLLM: no graph capture or compilation (quicker start).")
    tensor_parallel_size: int = Field(
        default=1, ge=1, le=64, description="vLLM: devices one server spreads the model over."
    )
    gpu_memory_utilization: float = Field(
        default=0.2, gt=0.0, le=0.98, description="vLLM: share of the device's memory to use (on CPUs: of the host's)."
    )
    kv_cache_gib: float = Field(default=1.0, gt=0.0, le=1024.0, description="CPU platform: size of the KV cache, GiB.")

    @model_validator(mode="after")
    def _deadlines_agree(self) -> Self:
        if self.min_group_size is not None and self.min_group_size > self.group_size:
            raise ValueError(f"min_group_size ({self.min_group_size}) is above group_size ({self.group_size})")
        if self.rollout_timeout_s is not None and self.rollout_timeout_s > self.group_timeout_s:
            raise ValueError(
                f"rollout_timeout_s ({self.rollout_timeout_s:g}) is above group_timeout_s ({self.group_timeout_s:g})"
            )
        return self

    @property
    def fewest_rollouts(self) -> int:
        """Rollouts that a group needs (k of G)."""
        return self.group_size if self.min_group_size is None else self.min_group_size
