"""What a trainer needs to know; the job spec's section `learner` carries the same names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from services.common.config.settings import Platform
from services.common.errors import ConfigError

DtypeName = Literal["float32", "bfloat16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """Layout over the ranks, batching and AdamW.

    Example: TrainerSettings(tensor_parallel_size=2, lr=1e-6, dtype="bfloat16"); the ranks that TP × PP leave over are DP.
    """

    platform: Platform = Platform.CPU
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    use_distributed_optimizer: bool = False
    """Shards the optimizer's state over the data-parallel ranks."""
    max_tokens_per_micro_batch: int = 8192
    """Rows × row length, padding included, that one rank runs at once."""
    packing: bool = False
    """Several sequences in one row."""
    lr: float = 1e-6
    lr_warmup_steps: int = 0
    """Steps over which the rate rises linearly; constant from then on."""
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    weight_decay: float = 0.0
    """Decoupled; biases and norms are left out, as Megatron does."""
    clip_grad: float = 1.0
    """Largest gradient norm; 0 turns clipping off."""
    dtype: DtypeName = "bfloat16"
    """Of parameters and activations; with bfloat16 the optimizer keeps float32 master weights."""
    publish_dtype: DtypeName = "bfloat16"
    """Of the weights that `export` gives."""
    fp32_output_layer: bool = False
    """Logits are computed in float32, whatever the dtype; the weights of the output layer keep theirs."""
    seed: int = 1234
    temperature: float = 1.0
    """Sampling temperature: log-probs are those of logits / temperature, as the rollout engine's are."""
    collective_timeout_s: float = 1800.0
    """A collective that waits longer ends the rank."""

    def __post_init__(self) -> None:
        """Checks ranges.

        Raises:
            ConfigError: names the field.
        """
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "max_tokens_per_micro_batch"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("lr", "adam_eps", "temperature", "collective_timeout_s"):
            if not getattr(self, name) > 0.0:
                raise ConfigError(f"{name} must be above 0, not {getattr(self, name)}")
        for name in ("lr_warmup_steps", "weight_decay", "clip_grad"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, and is {getattr(self, name)}")
        for name in ("dtype", "publish_dtype"):
            if getattr(self, name) not in {"float32", "bfloat16"}:
                raise ConfigError(f"{name} must be float32 or bfloat16, not {getattr(self, name)!r}")
