"""Sections `learner`, `critic`, `reference`, `off_policy`, `checkpoint` and `eval`."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import Field, StringConstraints, ValidationInfo, field_validator, model_validator

from services.common.spec.base import RECORDED, FieldError, Section
from services.common.spec.reference import check_model_path


class BackendName(StrEnum):
    """Values of `learner.backend`: what computes the models in training."""

    MEGATRON = "megatron"
    """Megatron-core: tensor, pipeline and data parallelism, for the architectures that have a bridge."""
    FSDP2 = "fsdp2"
    """torch's fully_shard around transformers' own model: data parallelism with sharded weights, for nearly any architecture."""


class Recompute(StrEnum):
    """Values of `learner.recompute`."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


class LrSchedule(StrEnum):
    """Values of `lr_schedule`: the learning rate after the warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


class Placement(StrEnum):
    """Which ranks hold a role."""

    ACTOR = "actor"
    """The actor's, each with the same part of the model."""
    OWN = "own"
    """Ranks of its own, as many as the actor's and in the same layout."""


_PLACEMENT = (
    "Ranks that hold it: actor, those of the actor; own, as many more in the same layout, on devices of their own, which "
    "compute at the same time."
)


class OptimizerFields(Section):
    """AdamW of one role, its schedule and its clipping; under bfloat16 it keeps float32 masters."""

    lr: float = Field(default=1e-6, gt=0.0, le=1.0, description="AdamW's learning rate after warm-up.")
    lr_warmup_steps: int = Field(default=10, ge=0, description="Steps over which the rate rises linearly.")
    lr_warmup_share: float | None = Field(
        default=None,
        ge=0.0,
        lt=1.0,
        description="The same as a share of learner.steps, in place of lr_warmup_steps. Off when null.",
    )
    lr_schedule: LrSchedule = Field(
        default=LrSchedule.CONSTANT,
        strict=False,
        description="After the warm-up: constant, or falling over learner.steps to lr × lr_min_ratio, linearly or as half a cosine.",
    )
    lr_min_ratio: float = Field(default=0.0, ge=0.0, le=1.0, description="Last rate ÷ lr of a falling schedule.")
    adam_beta1: float = Field(default=0.9, ge=0.0, lt=1.0, description="AdamW β₁.")
    adam_beta2: float = Field(default=0.999, ge=0.0, lt=1.0, description="AdamW β₂.")
    adam_eps: float = Field(default=1e-8, gt=0.0, le=1.0, description="AdamW ε.")
    weight_decay: float = Field(default=0.0, ge=0.0, le=1.0, description="AdamW's decoupled weight decay.")
    clip_grad: float = Field(default=1.0, ge=0.0, le=1e6, description="Largest gradient norm; 0 turns clipping off.")


class LearnerSpec(OptimizerFields):
    """Section `learner`: the actor's optimizer, the optimizer steps of a batch, and how models are spread over ranks."""

    steps: int = Field(default=100, ge=1, le=10_000_000, description="Optimizer steps of the job.")
    backend: BackendName = Field(
        default=BackendName.MEGATRON,
        strict=False,
        description="What computes the models in training: megatron, for tensor, pipeline and expert parallelism (Llama, Qwen2, Qwen3, "
        "Qwen3-MoE, Mixtral), or fsdp2, transformers' own models, everything sharded over the data-parallel ranks.",
    )
    fsdp_size: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="With fsdp2, ranks that hold one copy of the weights between them (hybrid sharding); it divides data_parallel_size. "
        "All ranks when null.",
    )
    tensor_parallel_size: int = Field(default=1, ge=1, le=64, description="Megatron tensor parallelism (TP).")
    pipeline_parallel_size: int = Field(default=1, ge=1, le=64, description="Megatron pipeline parallelism (PP).")
    data_parallel_size: int = Field(default=1, ge=1, le=4096, description="Data parallelism (DP).")
    context_parallel_size: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Context parallelism (CP): ranks that share the positions of a row, for long responses; rows are padded to a multiple "
        "of 2 × CP.",
    )
    expert_parallel_size: int = Field(
        default=1,
        ge=1,
        le=4096,
        description="Expert parallelism (EP), of a mixture of experts: data- and context-parallel ranks that share the experts of a layer; "
        "it divides data_parallel_size × context_parallel_size.",
    )
    router_aux_loss_coef: float = Field(
        default=0.0,
        ge=0.0,
        le=10.0,
        description="Of a mixture of experts: what the load-balancing loss, 1 for an even load, is multiplied by and added to the loss. "
        "Off when 0.",
    )
    use_distributed_optimizer: bool = Field(
        default=False, description="Shard the optimizer's state over data- and context-parallel ranks."
    )
    ppo_epochs: int = Field(default=1, ge=1, le=100, description="Times that a batch is trained on.")
    mini_batch_size: int | None = Field(
        default=None,
        ge=1,
        le=65_536,
        description="Groups of one optimizer step, which divide algorithm.filter_groups_train_batch_size: a batch is trained in its order, "
        "with the same proximal policy and learning rate. The whole batch when null.",
    )
    max_tokens_per_micro_batch: int = Field(
        default=8192,
        ge=16,
        le=16_777_216,
        description="Padded tokens one rank runs at once: with CP ranks a row has CP times as many.",
    )
    shared_prompts: bool = Field(
        default=True,
        description="Compute the prompt of a group once, with all its responses in one row; false: each response with a prompt of its own.",
    )
    packing: bool = Field(
        default=False, description="Of recorded jobs: several sequences in one row, without shared prompts."
    )
    recompute: Recompute = Field(
        default=Recompute.NONE,
        strict=False,
        description="Activations that the backward pass computes again instead of keeping: none; selective, those of the MLPs; full, all "
        "but each layer's input.",
    )
    sequence_parallel: bool = Field(
        default=False,
        description="Megatron's sequence parallelism: between attention and MLP each tensor-parallel rank keeps its part of a row's "
        "positions; rows are padded to a multiple of tensor_parallel_size, which must be above 1.",
    )
    seed: int = Field(default=1234, ge=0, lt=2**31, description="Seed of the ranks' random numbers.")
    threads_per_rank: int = Field(
        default=1,
        ge=0,
        le=1024,
        description="CPU platform: computing threads of one rank; 0: the learner's cores / ranks.",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, given: Any, info: ValidationInfo) -> Any:  # noqa: ANN401  any body of a request
        """A recorded spec that does not name `shared_prompts` is of a release that did not have them."""
        if info.context is RECORDED and isinstance(given, Mapping):
            return {"shared_prompts": False} | dict(given)
        return given

    @model_validator(mode="after")
    def _packing_is_recorded(self, info: ValidationInfo) -> Self:
        if self.packing and info.context is not RECORDED:
            raise FieldError("packing", "is replaced by shared_prompts, which computes less: leave it out")
        return self

    @model_validator(mode="after")
    def _settings_are_the_backends(self) -> Self:
        if self.backend is not BackendName.FSDP2:
            if self.fsdp_size is not None:
                message = "is a setting of backend fsdp2: leave it out, or set learner.backend to fsdp2"
                raise FieldError("fsdp_size", message)
            return self
        for name in (
            "context_parallel_size",
            "expert_parallel_size",
            "router_aux_loss_coef",
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "sequence_parallel",
            "use_distributed_optimizer",
        ):
            if getattr(self, name) != type(self).model_fields[name].default:
                message = "is a setting of backend megatron: leave it out, fsdp2 shards everything over the data-parallel ranks"
                raise FieldError(name, message)
        if self.fsdp_size is not None and self.data_parallel_size % self.fsdp_size:
            message = f"{self.fsdp_size} does not divide data_parallel_size ({self.data_parallel_size})"
            raise FieldError("fsdp_size", message)
        return self

    @model_validator(mode="after")
    def _positions_are_split_over_ranks(self) -> Self:
        if self.sequence_parallel and self.tensor_parallel_size == 1:
            message = "splits rows over tensor-parallel ranks: tensor_parallel_size must be above 1"
            raise FieldError("sequence_parallel", message)
        return self

    @model_validator(mode="after")
    def _experts_are_split_over_ranks(self) -> Self:
        if self.replicas % self.expert_parallel_size:
            message = f"{self.expert_parallel_size} does not divide data_parallel_size × context_parallel_size ({self.replicas})"
            raise FieldError("expert_parallel_size", message)
        if self.router_aux_loss_coef and not self.shared_prompts:
            message = "counts each computed position once: set shared_prompts, or leave it out"
            raise FieldError("router_aux_loss_coef", message)
        return self

    @property
    def row_multiple(self) -> int:
        """Number that divides the length of every computed row."""
        over_tensor_ranks = self.tensor_parallel_size if self.sequence_parallel else 1
        return over_tensor_ranks * (2 * self.context_parallel_size if self.context_parallel_size > 1 else 1)

    @property
    def replicas(self) -> int:
        """Ranks that hold the same part of the weights: DP × CP."""
        return self.data_parallel_size * self.context_parallel_size

    @property
    def world_size(self) -> int:
        """Ranks of the actor: TP × PP × DP × CP."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.replicas


class CriticSpec(OptimizerFields):
    """Section `critic`: a value model, the same architecture with a scalar head; absent: none."""

    path: Annotated[str, StringConstraints(min_length=1, max_length=1024)] | None = Field(
        default=None,
        description="Model whose weights it begins with, as model.path (null: those that the actor begins with).",
    )
    lr: float = Field(default=1e-5, gt=0.0, le=1.0, description="AdamW's learning rate after warm-up.")
    value_clip: float | None = Field(
        default=0.5,
        gt=0.0,
        description="A value moves at most this far from that at the start of the step. Off when null.",
    )
    warmup_steps: int = Field(
        default=0, ge=0, description="First steps of the job, in which only the critic is trained."
    )
    placement: Placement = Field(default=Placement.ACTOR, strict=False, description=_PLACEMENT)

    @field_validator("path")
    @classmethod
    def _known_form(cls, value: str | None) -> str | None:
        return value and check_model_path(value)


class ReferenceSpec(Section):
    """Section `reference`: a frozen policy that the actor's KL is measured against; absent: none."""

    path: Annotated[str, StringConstraints(min_length=1, max_length=1024)] | None = Field(
        default=None, description="The model, as model.path (null: the weights that the actor begins with)."
    )
    rebase_interval_steps: int | None = Field(
        default=None,
        ge=1,
        description="After every so many steps the actor's weights become the reference. Never when null.",
    )
    placement: Placement = Field(default=Placement.ACTOR, strict=False, description=_PLACEMENT)

    @field_validator("path")
    @classmethod
    def _known_form(cls, value: str | None) -> str | None:
        return value and check_model_path(value)


class OffPolicySpec(Section):
    """Section `off_policy`."""

    max_off_policy_steps: int = Field(
        default=2, ge=0, le=1000, description="Hard bound on policy_age; 0 is the synchronous mode."
    )


class CheckpointSpec(Section):
    """Section `checkpoint`."""

    interval_steps: int = Field(default=50, ge=1, description="Save every so many steps, and at the end.")
    keep_last: int = Field(default=2, ge=1, le=1000, description="Checkpoints kept.")
    export: bool = Field(default=True, description="Also write each checkpoint's weights in Hugging Face format.")
    load: Annotated[str, StringConstraints(min_length=1, max_length=1024)] | None = Field(
        default=None,
        description="Begin from another job's checkpoint (its directory, or the job's id: the newest), or from a Hugging Face directory "
        "under the allowed roots. The checkpoint's step, optimizer, random states and data position are taken over. It may have been saved "
        "with other sizes of TP, PP, DP and CP: weights and optimizer keep their bits, random states begin anew, sums round differently.",
        examples=["demo-3f2a9c1b", "demo-3f2a9c1b/checkpoints/step-00000050"],
    )
    finetune: bool = Field(
        default=False,
        description="Of `load`, take the weights only: step 0, a new optimizer, new random states. Always so for a Hugging Face directory.",
    )
    no_load_optim: bool = Field(
        default=False, description="Of `load`, do not take the optimizer's state; the step stays."
    )
    no_load_rng: bool = Field(default=False, description="Of `load`, do not take the random states.")

    @model_validator(mode="after")
    def _options_need_load(self) -> Self:
        for name in ("finetune", "no_load_optim", "no_load_rng"):
            if getattr(self, name) and self.load is None:
                raise ValueError(f"{name} says how to load: set checkpoint.load too")
        return self


class EvalSpec(Section):
    """Section `eval`: held-out evaluation through the same rollout servers."""

    enabled: bool = Field(default=False, description="Evaluate at the start, every interval and at the end.")
    interval_steps: int | None = Field(
        default=None, ge=1, description="Also every so many steps (null: only start and end)."
    )
    tasks: int = Field(default=128, ge=1, le=1_000_000, description="Held-out tasks, the first of `data.eval`.")
    samples: int = Field(default=8, ge=2, le=1024, description="Rollouts per task: avg@k and pass@k.")
    temperature: float = Field(default=1.0, gt=0.0, le=5.0, description="Sampling temperature of evaluation.")
    timeout_s: float = Field(
        default=1800.0,
        ge=1.0,
        le=86_400.0,
        description="Deadline of one evaluation; unanswered tasks are counted and named.",
    )
