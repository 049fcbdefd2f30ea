"""A model directory that is whole, and as small as can be."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from examples.demo.charlm_tokenizer import VOCAB_SIZE, make_tokenizer, save_tokenizer
from services.common.models.directory import ModelInfo
from services.common.models.weight_files import needed_tensors

INFO = ModelInfo("LlamaForCausalLM", 2, 4, 2, 32, 48, VOCAB_SIZE, 1024, tie_word_embeddings=True)
"""4 heads, 2 key-value heads."""


def write_tiny_model(folder: Path) -> None:
    """Writes config, tokenizer, chat template and weights."""
    folder.mkdir(parents=True)
    config = {
        "architectures": [INFO.architecture],
        "model_type": "llama",
        "num_hidden_layers": INFO.num_layers,
        "num_attention_heads": INFO.num_attention_heads,
        "num_key_value_heads": INFO.num_key_value_heads,
        "hidden_size": INFO.hidden_size,
        "intermediate_size": INFO.intermediate_size,
        "vocab_size": INFO.vocab_size,
        "max_position_embeddings": INFO.max_position_embeddings,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_tokenizer(make_tokenizer(INFO.max_position_embeddings), folder)
    weights = {name: np.full(shape, 0.01, np.float32) for name, shape in needed_tensors(INFO, config)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
