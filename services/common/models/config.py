"""Configuration of a model, made by transformers from config.json: which of its settings can be trained here."""

from __future__ import annotations

import math
from typing import Any

from services.common.errors import ModelError

LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Constants of Megatron's Llama 3 frequency scaling; only the factor is free."""
_ROPES = ("default", "linear", "llama3")


def check_trainable(config: Any, where: str, *, field: str = "") -> None:  # noqa: ANN401  transformers comes without types
    """Raises ModelError, which names the key, `where` and `field`, for settings that cannot be trained rightly."""
    refused: dict[str, Any] = {
        # Qwen2's biases on query, key and value are not settable; this setting adds a bias to the output projection, which mbridge omits
        "attention_bias": config.model_type != "qwen2" and getattr(config, "attention_bias", False),
        "mlp_bias": getattr(config, "mlp_bias", False),
        "use_sliding_window": getattr(config, "use_sliding_window", False),
        "hidden_act": config.hidden_act if config.hidden_act != "silu" else False,
        # of a mixture, every layer has experts, and every layer attends to all earlier positions
        "decoder_sparse_step": (step := getattr(config, "decoder_sparse_step", 1)) != 1 and step,
        "mlp_only_layers": getattr(config, "mlp_only_layers", None),
        "sliding_window": config.model_type == "mixtral" and config.sliding_window,
    }
    for key, value in refused.items():
        if value:
            raise ModelError(f"{where}: {key} = {value!r} is not supported", field=field)
    rope_parameters(config, where, field=field)


def rope_parameters(config: Any, where: str, *, field: str = "") -> dict[str, Any]:  # noqa: ANN401
    """`rope_type`, `rope_theta` and, where it scales, `factor`; transformers 5 has them in `rope_parameters`, earlier versions apart.

    Raises:
        ModelError: a rotary embedding that Megatron does not have.
    """
    found, numbers = _rope_of(config), check_rope_numbers(config, where, field=field)
    kind = found.get("rope_type", "default")
    wanted: dict[str, Any] = {"partial_rotary_factor": 1.0} if "partial_rotary_factor" in found else {}
    if kind not in _ROPES:
        raise ModelError(f"{where}: rope_parameters: rope_type = {kind!r} is not supported", field=field)
    if kind == "llama3":
        wanted |= LLAMA3_ROPE
    for key, value in wanted.items():
        if found.get(key) != value:
            message = f"{where}: rope_parameters: {key} = {found.get(key)!r} is not supported (only {value})"
            raise ModelError(message, field=field)
    return {"rope_type": kind, **numbers}


def check_rope_numbers(config: Any, where: str, *, field: str = "") -> dict[str, Any]:  # noqa: ANN401
    """`rope_theta` and, of an embedding that scales, `factor`. Raises ModelError where they are no positive numbers."""
    found = _rope_of(config)
    kind = found.get("rope_type", "default")
    if not isinstance(kind, str):
        raise ModelError(f"{where}: rope_parameters: rope_type = {kind!r} is not supported", field=field)
    numbers: dict[str, Any] = {"rope_theta": found.get("rope_theta") or getattr(config, "rope_theta", 10_000.0)}
    if kind != "default" and (kind in _ROPES or "factor" in found):
        numbers["factor"] = found.get("factor")
    for key, value in numbers.items():
        if type(value) not in {int, float} or not math.isfinite(value) or value <= 0:
            raise ModelError(f"{where}: rope_parameters: {key} must be a positive number, not {value!r}", field=field)
    return numbers


def _rope_of(config: Any) -> dict[str, Any]:  # noqa: ANN401
    """Of all layers; a model whose layers have different ones keeps each under the layers' name, and has none here."""
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return found if "rope_type" in found or not any(isinstance(value, dict) for value in found.values()) else {}
