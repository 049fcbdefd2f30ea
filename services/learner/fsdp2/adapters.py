"""Low-rank adapters (LoRA) of the policy, by peft: W + α/r · B A, of which A and B are trained and W stays.

trained, checkpointed   A and B
published, exported     the merged weights, and in an export A and B as peft's own files
"""

from __future__ import annotations

import json
from typing import Any

import torch

from services.common.errors import ConfigError
from services.common.spec.rollout import LoraSpec
from services.learner.training.tensor_file import Weights

NAME = "default"
"""The one adapter's, within peft."""
BASE = ".base_layer"
A, B = f".lora_A.{NAME}.weight", f".lora_B.{NAME}.weight"
_FIELD = "model.lora.target_modules"


def add_adapters(causal: Any, spec: LoraSpec, seed: int) -> None:  # noqa: ANN401  transformers comes without types
    """Puts adapters on the model, the same on every rank, in float32; what they add is 0 at first. Nothing else is trained.

    Raises:
        ConfigError: the model has no such modules, or one is no linear layer.
    """
    from peft import inject_adapter_in_model
    from peft.tuners.lora import Linear

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(_config(spec), causal, NAME)
        except ValueError as error:
            raise ConfigError(str(error), field=_FIELD) from error
    for name, module in causal.named_modules():
        if hasattr(module, "lora_A") and not (
            isinstance(module, Linear) and isinstance(module.get_base_layer(), torch.nn.Linear)
        ):
            raise ConfigError(f"{name} is no linear layer: it cannot have an adapter", field=_FIELD)
    for name, parameter in causal.named_parameters():
        if is_adapter(name):
            parameter.data = parameter.data.float()


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is an adapter's."""
    return name.endswith((A, B))


def base_of(name: str) -> str:
    """The parameter that an adapter of this name adds to."""
    return name.removesuffix(A).removesuffix(B) + ".weight"


def plain_name(name: str) -> str:
    """A parameter's name in a model without adapters."""
    return name.replace(f"{BASE}.", ".")


def scale_of(spec: LoraSpec) -> float:
    """What B A is multiplied by."""
    return spec.alpha / spec.rank


def peft_files(spec: LoraSpec, adapters: Weights, base_model: str) -> tuple[Weights, str]:
    """Tensors and configuration as in peft's files. `adapters`: by their names here."""
    tensors = {f"base_model.model.{name.replace(f'.{NAME}.', '.')}": tensor for name, tensor in adapters.items()}
    document = {
        name: sorted(value) if isinstance(value, set) else value for name, value in _config(spec).to_dict().items()
    }
    modules = sorted({base_of(name).removesuffix(".weight").rpartition(".")[2] for name in adapters})
    return tensors, json.dumps(
        document | {"base_model_name_or_path": base_model, "target_modules": modules}, indent=2, default=str
    )


def _config(spec: LoraSpec) -> Any:  # noqa: ANN401  peft's
    from peft import LoraConfig

    return LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,
        lora_dropout=spec.dropout,
        target_modules=spec.target_modules or "all-linear",
        bias="none",
        task_type="CAUSAL_LM",
    )
