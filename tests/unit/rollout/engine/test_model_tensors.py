"""What a new version must bring."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from services.common.errors import ModelError
from services.rollout.engine.model_tensors import model_shapes, shape_differences

TIED = {
    "model.embed_tokens.weight": np.zeros((8, 4), np.float32),
    "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(2, np.float32),
    "model.norm.weight": np.zeros(4, np.float32),
}


def test_a_tied_model_needs_its_output_head_and_no_buffers(tmp_path: Path) -> None:
    save_file(TIED, tmp_path / "model.safetensors")
    assert model_shapes(tmp_path) == {
        "model.embed_tokens.weight": (8, 4), "model.norm.weight": (4,), "lm_head.weight": (8, 4),
    }  # fmt: skip


def test_shards_are_read_together(tmp_path: Path) -> None:
    save_file({"model.embed_tokens.weight": np.zeros((8, 4), np.float32)}, tmp_path / "a.safetensors")
    save_file({"lm_head.weight": np.zeros((9, 4), np.float32)}, tmp_path / "b.safetensors")
    index = {"weight_map": {"model.embed_tokens.weight": "a.safetensors", "lm_head.weight": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert model_shapes(tmp_path) == {"model.embed_tokens.weight": (8, 4), "lm_head.weight": (9, 4)}


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        model_shapes(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        model_shapes(tmp_path)


def test_every_difference_has_its_line() -> None:
    wanted = {"a": (1,), "b": (2, 3), "c": (4,)}
    assert shape_differences(wanted, {"b": (3, 2), "c": (4,), "d": (1,)}) == [
        "a is missing", "d is not in the model", "b is (3, 2), not (2, 3)",
    ]  # fmt: skip
    assert shape_differences(wanted, dict(wanted)) == []
