"""Which tensors a new version must bring, so that none of the old one stays."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import safe_open

from services.common.errors import ModelError

_BUFFERS = ("rotary_emb.inv_freq",)
"""Endings of what old files carry and nobody trains."""

LM_HEAD = "lm_head.weight"
"""Tied models' files leave it out, but engines keep a packed copy of it that would go stale."""


def required_tensors(model_dir: Path) -> frozenset[str]:
    """Names of the tensors in a model's safetensors files, and the output head.

    Raises:
        ModelError: there are no such files, or they cannot be read; names the file.
    """
    index = model_dir / "model.safetensors.index.json"
    single = model_dir / "model.safetensors"
    try:
        if index.is_file():
            names = set(json.loads(index.read_text())["weight_map"])
        else:
            with safe_open(single, framework="numpy") as file:
                names = set(file.keys())
    except Exception as error:  # the library raises exceptions of its own
        raise ModelError(f"{index if index.is_file() else single}: cannot be read: {error}") from error
    return frozenset(name for name in names if not name.endswith(_BUFFERS)) | {LM_HEAD}
