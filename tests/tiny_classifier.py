"""A tiny reward model over the demo's characters, with weights set by hand: +3 for a response that ends in a digit, −3 for any other.

Its one layer adds nothing, so that the number follows from the embedding of the last token alone; its chat template puts no token after the
response.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from examples.demo.charlm_tokenizer import VOCAB_SIZE, make_tokenizer, save_tokenizer

HIDDEN = 32
SCORE = 3.0
CHAT_TEMPLATE = "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{% endfor %}"
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForSequenceClassification"],
    "model_type": "llama",
    "id2label": {"0": "reward"},
    "label2id": {"reward": 0},
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-6,
}


def write_tiny_classifier(folder: Path, **config: Any) -> Path:
    """Writes config, tokenizer, chat template and weights; `config`: settings other than CONFIG's, in its file alone."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    tokenizer = make_tokenizer(CONFIG["max_position_embeddings"])
    save_tokenizer(tokenizer, folder)
    _put_template(folder)
    digits = [tokenizer.convert_tokens_to_ids(digit) for digit in "0123456789"]
    save_file(tensors(digits), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def tensors(digits: list[int]) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """The weights; `digits`: the tokens that are worth SCORE."""
    embedding = np.zeros((VOCAB_SIZE, HIDDEN), np.float32)
    embedding[:, :2] = (-1.0, 1.0)
    embedding[digits, 0] = 1.0
    head = np.zeros((1, HIDDEN), np.float32)
    head[0, 0] = SCORE / np.sqrt(HIDDEN / 2)  # the norm makes ±1 of two entries ±4 of 32
    layer, kv, width = "model.layers.0", HIDDEN // 2, CONFIG["intermediate_size"]
    shapes = {
        "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (kv, HIDDEN), "self_attn.v_proj": (kv, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (width, HIDDEN), "mlp.up_proj": (width, HIDDEN),
        "mlp.down_proj": (HIDDEN, width),
    }  # fmt: skip
    norms = ("model.norm", f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm")
    return {
        "model.embed_tokens.weight": embedding,
        "score.weight": head,
        **{f"{layer}.{name}.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()},
        **{f"{name}.weight": np.ones(HIDDEN, np.float32) for name in norms},
    }


def _put_template(folder: Path) -> None:
    """Replaces the demo's chat template, which ends with a token of its own."""
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": CHAT_TEMPLATE}, indent=2))
