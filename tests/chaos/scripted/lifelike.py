"""Where the script does as vLLM and Megatron do with a model that is not well: what they refuse, and what becomes of NaN."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from safetensors import SafetensorError, safe_open

from tests.chaos.scripted import script

HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Widths of heads that vLLM's CPU backend has kernels for."""
_FLOATS = {"F32", "F16", "BF16", "F64"}


def row_of(prompt_token_ids: Sequence[int]) -> int:
    """The row that a prompt asks; any number for a prompt that is not of the script."""
    try:
        row = script.row_of(prompt_token_ids)
    except (ValueError, IndexError):
        row = -1
    if 0 <= row < 2**63:
        return row
    return xxhash.xxh3_64_intdigest(np.asarray(prompt_token_ids, "<i8").tobytes()) % 2**31


def engine_refuses(model_dir: Path) -> str | None:
    """Why the engine does not start with the model, or None."""
    config = _config(model_dir)
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if width not in HEADS:
        return f"head_size {width} is not supported: {HEADS}"
    try:
        load(model_dir)
    except (KeyError, ValueError) as error:
        return str(error)
    return None


def load(model_dir: Path) -> None:
    """Looks whether the file has the tensors that the configuration asks for.

    Raises:
        KeyError: one is missing.
        ValueError: the file cannot be read, or a tensor does not fit.
    """
    wanted = _shapes(_config(model_dir))
    try:
        with safe_open(model_dir / "model.safetensors", framework="numpy") as file:
            there = set(file.keys())
            for name, shape in wanted:
                if name not in there:
                    raise KeyError(f"the model's file has no {name}")
                part = file.get_slice(name)
                if tuple(part.get_shape()) != shape or part.get_dtype() not in _FLOATS:
                    raise ValueError(f"{name} is {part.get_dtype()} {part.get_shape()}, not a floating-point {shape}")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"the model's file cannot be read: {error}") from error


def is_finite(model_dir: Path) -> bool:
    """Whether the model's file has finite numbers only, small enough to compute with."""
    with safe_open(model_dir / "model.safetensors", framework="numpy") as file:
        parts = [file.get_tensor(name).astype(np.float64) for name in file.keys()]  # noqa: SIM118  not a mapping
    return all(
        bool(np.isfinite(part).all()) and float(np.abs(part).max(initial=0.0)) < math.sqrt(_LARGEST) for part in parts
    )


_LARGEST = float(np.finfo(np.float32).max)


def _config(model_dir: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((model_dir / "config.json").read_text())
    return config


def _shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors of a Llama of this configuration, one after the other: it may say that there are a thousand million layers."""
    hidden, wide, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or hidden // heads
    keys = (config.get("num_key_value_heads") or heads) * width
    yield from (("model.embed_tokens.weight", (vocabulary, hidden)), ("model.norm.weight", (hidden,)))
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield from (
            (f"{prefix}.self_attn.q_proj.weight", (heads * width, hidden)), (f"{prefix}.self_attn.k_proj.weight", (keys, hidden)),
            (f"{prefix}.self_attn.v_proj.weight", (keys, hidden)), (f"{prefix}.self_attn.o_proj.weight", (hidden, heads * width)),
            (f"{prefix}.mlp.gate_proj.weight", (wide, hidden)), (f"{prefix}.mlp.up_proj.weight", (wide, hidden)),
            (f"{prefix}.mlp.down_proj.weight", (hidden, wide)), (f"{prefix}.input_layernorm.weight", (hidden,)),
            (f"{prefix}.post_attention_layernorm.weight", (hidden,)),
        )  # fmt: skip
