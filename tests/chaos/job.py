"""What a chaos run trains: a model directory of the right form, a file of tasks, and the job's spec."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.chaos.scripted import script
from tests.chaos.scripted.checks import MODEL

ROWS = 5_000
"""Tasks in the file; the job goes round and round."""
GROUPS_PER_STEP = 16

_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": script.HIDDEN, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": script.VOCABULARY, "max_position_embeddings": 4096,
}  # fmt: skip


def furnish(home: Path) -> None:
    """Puts model and tasks where the services look for them."""
    model, data = home / "models" / MODEL, home / "data"
    model.mkdir(parents=True)
    data.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(_CONFIG))
    (model / "tokenizer.json").write_text("{}")
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    save_file({script.EMBEDDING: np.zeros(script.SHAPE, np.float32)}, model / "model.safetensors")
    with (data / "rows.jsonl").open("w") as file:
        for row in range(ROWS):
            prompt = [{"role": "user", "content": script.prompt(row)}]
            task = {"prompt": prompt, "data_source": script.DATA_SOURCE, "ground_truth": script.answer(row)}
            file.write(json.dumps(task) + "\n")


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
