"""Bad parts of config.json: values of the wrong kind, sizes that do not fit, shapes that the engine cannot run."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
from safetensors.numpy import save

from tests.chaos.grammar.draft import Draft, Expected, Part, Parts, a_pipe
from tests.chaos.job import initial_weights
from tests.chaos.scripted import script

FILE, WEIGHTS = "config.json", "model.safetensors"

SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
    "max_position_embeddings", "head_dim",
)  # fmt: skip
_NO_SIZES: tuple[Any, ...] = (0, -1, 10**12, 10**30, "32", 1.5, 1e300, True, [32], {}, float("nan"), float("inf"))
_ODD: dict[str, tuple[Any, ...]] = {
    "rms_norm_eps": (-1.0, "x", 10**400, None, [], float("nan"), 0.0),
    "hidden_act": ("nope", 7, None, "__import__('os')", ""),
    "tie_word_embeddings": ("yes", 7, []),
    "attention_bias": (True, "yes", 7),
    "mlp_bias": (True, "yes"),
    "torch_dtype": ("nope", 7, "float8", []),
    "sliding_window": (-1, "x", 0, 10**30),
    "layer_types": (["nope"], [], 7, ["full_attention"] * 9),
    "rope_theta": ("abc", 0, -1, float("nan"), [], 10**400),
    "attention_dropout": (2.0, "x"),
    "pretraining_tp": (3, "x"),
    "model_type": ("nope", 7, "qwen2", "bert"),
    "transformers_version": (7, "99.0"),
    "initializer_range": ("x", -1),
    "eos_token_id": (10**12, "x", [], -1),
    "use_cache": ("x",),
    "dtype": ("nope", 7),
}
_ROPES: tuple[Any, ...] = (
    {"type": "nope"}, {"rope_type": "yarn"}, {"rope_type": "yarn", "factor": "x"}, {"rope_type": "linear", "factor": -1.0},
    {"rope_type": "llama3"}, {"rope_type": "dynamic", "factor": 1e300}, [], "yarn", 7, {"rope_type": 7}, {"factor": 10**400},
    {"rope_type": "longrope", "short_factor": [1.0], "long_factor": []}, {"type": "yarn", "rope_type": "linear", "factor": None},
)  # fmt: skip


def _config(change: Callable[[dict[str, Any], random.Random], object], expected: Expected = Expected.ENDS) -> Part:
    def part(draft: Draft, rng: random.Random) -> None:
        draft.change_json(FILE, lambda document: change(document, rng))
        draft.expect(expected)

    return part


def _written(make: Callable[[bytes], bytes]) -> Part:
    def part(draft: Draft, _: random.Random) -> None:
        draft.write(FILE, make(draft.read(FILE)))
        draft.expect(Expected.REFUSED)

    return part


def _heads(*choices: int) -> Part:
    """Weights and sizes agree, and the engine has no kernel for heads of this width."""

    def part(draft: Draft, rng: random.Random) -> None:
        dim = rng.choice(choices)
        draft.change_json(FILE, lambda document: document.update(head_dim=dim))
        tensors = initial_weights()
        for name in tensors:
            if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
                tensors[name] = np.zeros((dim, script.HIDDEN), np.float32)
            elif name.endswith("o_proj.weight"):
                tensors[name] = np.zeros((script.HIDDEN, dim), np.float32)
        draft.write(WEIGHTS, save(tensors))
        draft.expect(Expected.ENDS)

    return part


def _small_vocabulary(draft: Draft, rng: random.Random) -> None:
    """Weights and sizes agree, and the tokenizer has ids beyond them."""
    size = rng.choice((1, 16, 64))
    draft.change_json(FILE, lambda document: document.update(vocab_size=size))
    tensors = initial_weights()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][:size].copy()
    draft.write(WEIGHTS, save(tensors))
    draft.expect(Expected.ENDS)


def _many_positions(draft: Draft, rng: random.Random) -> None:
    """The engine's and the ranks' tables of positions grow with it."""
    positions = rng.choice((2_000_000, 10**9, 10**15, 2**63))
    draft.change_json(FILE, lambda document: document.update(max_position_embeddings=positions))


CONFIGS: Parts = {
    "config: no size": _config(lambda d, rng: d.update({rng.choice(SIZES): rng.choice(_NO_SIZES)})),
    "config: a size that is missing": _config(lambda d, rng: d.pop(rng.choice(SIZES[:3])), Expected.REFUSED),
    "config: a size that the weights do not have": _config(
        lambda d, rng: d.update(
            {(key := rng.choice(("hidden_size", "intermediate_size", "vocab_size", "head_dim"))): d[key] * 2}
        )
    ),
    "config: layers that are not there": _config(
        lambda d, rng: d.update(num_hidden_layers=rng.choice((2, 1000, 10**9)))
    ),
    "config: heads that do not divide": _config(lambda d, _: d.update(num_attention_heads=4, num_key_value_heads=3)),
    "config: heads that the engine has no kernel for": _heads(2, 8, 16, 24, 48, 1024),
    "config: a vocabulary smaller than the tokenizer's": _small_vocabulary,
    "config: positions without end": _many_positions,
    "config: rope settings": _config(
        lambda d, rng: d.update({rng.choice(("rope_scaling", "rope_parameters")): rng.choice(_ROPES)}),
        Expected.HARMLESS,
    ),
    "config: odd values": _config(
        lambda d, rng: d.update({(key := rng.choice(sorted(_ODD))): rng.choice(_ODD[key])}), Expected.HARMLESS
    ),
    "config: unsupported architecture": _config(
        lambda d, rng: d.update(
            architectures=rng.choice(
                (["GPT2LMHeadModel"], ["LlamaForCausalLM"] * 2, "LlamaForCausalLM", [], None, [7], {})
            )
        ),
        Expected.REFUSED,
    ),
    "config: another architecture": _config(
        lambda d, rng: d.update(architectures=[rng.choice(("Qwen2ForCausalLM", "Qwen3ForCausalLM"))])
    ),
    "config: quantized": _config(
        lambda d, _: d.update(quantization_config={"quant_method": "gptq", "bits": 4}), Expected.REFUSED
    ),
    "config: remote code": _config(lambda d, _: d.update(auto_map={"AutoConfig": "x.C"}), Expected.REFUSED),
    "config: keys twice": _written(
        lambda raw: raw[:-1] + b', "hidden_size": 64, "hidden_size": 16, "architectures": []}'
    ),
    "config: truncated": _written(lambda raw: raw[: len(raw) // 2]),
    "config: empty": _written(lambda _: b""),
    "config: no object": _written(lambda raw: b"[" + raw + b"]"),
    "config: deep nesting": _written(lambda raw: raw[:-1] + b', "x": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"),
    "config: 40 MB": _written(lambda raw: raw[:-1] + b', "x": "' + b"x" * 40_000_000 + b'"}'),
    "config: not UTF-8": _written(lambda raw: b"\xff\xfe\x00" + raw),
    "config: a pipe": a_pipe(FILE),
}
