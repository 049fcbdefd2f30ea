"""What a chaos run trains: a model directory of the right form, a file of tasks, and the job's spec."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from services.common.streams.types import Float32Array
from tests.chaos.scripted import script

ROWS = 5_000
"""Tasks in the file; the job goes round and round."""
GROUPS_PER_STEP = 16
MODEL = "scripted"
TALKING = "talking"
"""The same model, whose chat template closes each answer, as turns with an environment need it."""

_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": script.HIDDEN, "head_dim": script.HEAD_DIM,
    "intermediate_size": script.INTERMEDIATE, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
    "vocab_size": script.VOCABULARY, "max_position_embeddings": 4096, "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip
_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
_TALKING_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% if message['role'] == 'assistant' %}"
    f"{chr(script.END_OF_TURN)}{{% endif %}}{{% endfor %}}"
)
_NOT_STRIPPED = ("lstrip", "rstrip", "single_word", "normalized")
_WEIGHT_SEED = 1
_SCALE = 0.02


def furnish(home: Path) -> None:
    """Puts model and tasks where the services look for them."""
    data = home / "data"
    data.mkdir(parents=True)
    _write_model(home / "models" / MODEL, _CONFIG, tokenizer(), _TEMPLATE)
    ended = {"id": script.END_OF_TURN, "content": chr(script.END_OF_TURN), "special": True}
    ends = tokenizer() | {"added_tokens": [ended | dict.fromkeys(_NOT_STRIPPED, False)]}
    _write_model(home / "models" / TALKING, _CONFIG | {"eos_token_id": script.END_OF_TURN}, ends, _TALKING_TEMPLATE)
    with (data / "rows.jsonl").open("w") as file:
        for row in range(ROWS):
            prompt = [{"role": "user", "content": script.prompt(row)}]
            task = {"prompt": prompt, "data_source": script.DATA_SOURCE, "ground_truth": script.answer(row)}
            file.write(json.dumps(task) + "\n")


def _write_model(model: Path, config: dict[str, Any], tokenizer: dict[str, Any], template: str) -> None:
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(config))
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    save_file(initial_weights(), model / "model.safetensors")


def tokenizer() -> dict[str, Any]:
    """A real tokenizer that does as the script does: ids are characters' codes; a response's text ends in the parity of its last token.

    `script.encode` gives the same ids, and `script.text` an answer that is as right.
    """
    digits = [{"type": "Replace", "pattern": {"String": str(d)}, "content": f" {d} #### {d % 2} "} for d in range(10)]
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None, "post_processor": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False},
        "decoder": {"type": "Sequence", "decoders": [*digits, {"type": "Fuse"}]},
        "model": {"type": "WordLevel", "vocab": {chr(code): code for code in range(script.VOCABULARY)}, "unk_token": "?"},
    }  # fmt: skip


def initial_weights() -> dict[str, Float32Array]:
    """The tensors of the model's file: small, as those of a model that was never trained; norms are ones."""
    rng = np.random.default_rng(_WEIGHT_SEED)
    return {
        name: np.ones(shape, np.float32) if len(shape) == 1 else rng.normal(0.0, _SCALE, shape).astype(np.float32)
        for name, shape in script.SHAPES.items()
    }


def job_spec(
    *, steps: int, ranks: int = 1, interval_steps: int = 20, max_off_policy_steps: int = 2, **sections: Any
) -> dict[str, Any]:
    """The job as it is submitted; `sections` replace or add whole sections."""
    spec: dict[str, Any] = {
        "name": "chaos",
        "model": {"path": MODEL, "dtype": "float32"},
        "data": {"train": {"source": "rows.jsonl"}, "shuffle": False},
        "rollout": {
            "group_size": script.GROUP_SIZE, "rollout_max_tokens": script.TOKENS, "max_concurrent_groups": 64,
            "group_timeout_s": 20.0, "max_attempts": 20,
        },
        "reward": {"timeout_s": 5.0},
        "algorithm": {"filter_groups_train_batch_size": GROUPS_PER_STEP},
        "learner": {"steps": steps, "data_parallel_size": ranks},
        "off_policy": {"max_off_policy_steps": max_off_policy_steps},
        "checkpoint": {"interval_steps": interval_steps, "keep_last": 2, "export": False},
    }  # fmt: skip
    return spec | sections
