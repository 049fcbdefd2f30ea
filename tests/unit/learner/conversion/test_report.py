"""What a checkpoint or a model directory holds is counted once, and what is wrong with it is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from services.common.checkpoints.manifest import (
    MANIFEST,
    WrittenFile,
    digest_of_file,
    dump_manifest,
    manifest_document,
)
from services.common.errors import ConfigError, ModelError
from services.learner.conversion.report import Report, find_weights, inspect
from tests.tiny_model import INFO, write_tiny_model

HIDDEN, VOCABULARY, QKV = 8, 12, 16
SHAPE = {"architecture": "LlamaForCausalLM", "num_layers": 2, "tie_word_embeddings": True}
STAGES = (
    ("embedding.word_embeddings.weight", "decoder.layers.0.input_layernorm.weight"),
    ("decoder.layers.0.self_attention.linear_qkv.bias", "decoder.final_layernorm.weight", "output_layer.weight"),
)
"""Parameters of each stage; the output layer of the actor is a copy of the embedding, and that of the critic a head."""
SIZES = {
    "embedding.word_embeddings.weight": (VOCABULARY // 2, HIDDEN),
    "decoder.layers.0.input_layernorm.weight": (HIDDEN,),
    "decoder.layers.0.self_attention.linear_qkv.bias": (QKV // 2,),
    "decoder.final_layernorm.weight": (HIDDEN,),
    "output_layer.weight": (VOCABULARY // 2, HIDDEN),
}
"""Shape of the part of one of two tensor-parallel ranks."""
PARAMETERS = VOCABULARY * HIDDEN + HIDDEN + QKV + HIDDEN


def write_checkpoint(path: Path, *, apart: bool = False, **state: Any) -> Path:
    """Ranks of TP 2, PP 2 and DP 2 with actor and critic, which has ranks of its own where it is `apart`, and a manifest."""
    path.mkdir(parents=True)
    layout = {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "data_parallel_size": 2,
        "use_distributed_optimizer": False,
    }
    about = json.dumps({"format": 2, "layout": layout | {"dtype": "float32"}})
    for rank in range(8):
        tensors = {"rng.cpu": np.zeros(3, np.uint8), "optimizer.0.0.0.exp_avg": np.zeros(2, np.float32)}
        for name in STAGES[rank // 4]:
            tensors[f"model.{name}"] = np.full(SIZES[name], rank, np.float32)
        critic = {
            f"critic.model.{name}": np.full(
                (1, HIDDEN) if name == "output_layer.weight" else SIZES[name], rank, np.float32
            )
            for name in STAGES[rank // 4]
        }
        file = f"rank-{rank:05d}.safetensors"
        save_file(tensors if apart else tensors | critic, path / file, {"about": about})
        if apart:
            save_file(critic, path / f"critic-{file}", {"about": about})
    files = [WrittenFile(f.name, f.stat().st_size, digest_of_file(f)) for f in sorted(path.glob("*rank-*"))]
    identity = {"job_id": "demo-1", "shape": SHAPE, "spec": {}}
    document = manifest_document(7, {"identity": identity, "lineage": 3} | state, files)
    (path / MANIFEST).write_bytes(dump_manifest(document))
    return path


@pytest.mark.parametrize("apart", [False, True])
def test_parameters_of_each_role_are_counted_once_over_all_ranks(tmp_path: Path, apart: bool) -> None:
    report = inspect(write_checkpoint(tmp_path / "step-00000007", apart=apart))
    assert (report.problems, report.verified) == ([], True)
    assert report.parameters == report.roles["actor"].parameters == PARAMETERS
    assert report.roles["critic"].parameters == PARAMETERS + HIDDEN, "the head is whole on every rank"
    assert (report.roles["actor"].optimizer, report.roles["critic"].optimizer) == (True, False)
    assert len(report.tensors) == 8 * 2 + 2 * 4 * 2 + 2 * 4 * 3


def test_a_report_says_job_step_layout_and_versions(tmp_path: Path) -> None:
    report = inspect(write_checkpoint(tmp_path / "step-00000007", names_places=True))
    assert (report.job, report.step, report.dtype, report.architecture) == ("demo-1", 7, "float32", "LlamaForCausalLM")
    assert (report.layout["pipeline_parallel_size"], report.shape["num_layers"]) == (2, 2)
    assert report.versions == {
        "manifest": 2, "rank_files": 2, "lineage": 3, "policy_version": 7, "other_layouts": True,
    }  # fmt: skip
    assert report.weights_only is False


def test_the_optimizer_of_an_earlier_release_has_no_other_layout(tmp_path: Path) -> None:
    assert inspect(write_checkpoint(tmp_path / "old")).versions["other_layouts"] is False
    assert inspect(write_checkpoint(tmp_path / "weights", weights_only=True)).versions["other_layouts"] is True


def test_a_record_lists_tensors_where_they_are_asked_for(tmp_path: Path) -> None:
    report = inspect(write_checkpoint(tmp_path / "step-00000007"))
    assert "tensors" not in report.as_record(tensors=False)
    listed = json.loads(json.dumps(report.as_record(tensors=True)))["tensors"]
    part = {"role": "actor", "shape": [VOCABULARY // 2, HIDDEN], "dtype": "float32", "file": "rank-00001.safetensors"}
    assert part | {"name": "model.embedding.word_embeddings.weight"} in listed


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: (path / MANIFEST).write_text("{"), "MANIFEST.json: "),
        (lambda path: (path / "rank-00003.safetensors").unlink(), "rank-00003.safetensors: missing"),
        (lambda path: flip(path / "rank-00005.safetensors"), "rank-00005.safetensors: its checksum differs"),
    ],
)
def test_what_does_not_verify_names_the_file(tmp_path: Path, spoil: Callable[[Path], object], words: str) -> None:
    path = write_checkpoint(tmp_path / "step-00000007")
    spoil(path)
    report = inspect(path)
    assert report.verified is False
    assert words in report.problems[0]


def test_without_digests_a_changed_byte_is_not_seen_and_nothing_is_said_to_verify(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "step-00000007")
    flip(path / "rank-00005.safetensors")
    report = inspect(path, verify=False)
    assert (report.verified, report.problems) == (None, [])


def model_report(folder: Path, change: Callable[[dict[str, Any]], object]) -> Report:
    write_tiny_model(folder)
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return inspect(folder)


def test_a_model_directory_is_reported_with_its_shape(tmp_path: Path) -> None:
    report = model_report(tmp_path / "model", lambda _: None)
    assert (report.kind, report.problems, report.verified) == ("hugging_face", [], None)
    assert (report.architecture, report.dtype) == (INFO.architecture, "float32")
    assert report.shape["num_layers"] == INFO.num_layers
    assert report.parameters > INFO.vocab_size * INFO.hidden_size


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures ['GPT2LMHeadModel'] is not supported"),
        ({"num_hidden_layers": 3}, "model.layers.2.input_layernorm.weight is missing"),
    ],
)
def test_a_model_that_cannot_be_trained_is_reported_with_the_reason(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    report = model_report(tmp_path / "model", lambda config: config.update(change))
    assert words in report.problems[0]
    assert report.tensors


def test_config_json_that_is_no_json_is_named(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json: is not JSON"):
        inspect(tmp_path / "model")


class TestFinding:
    def test_a_job_and_its_folders_name_the_newest_checkpoint(self, tmp_path: Path) -> None:
        folder = tmp_path / "jobs" / "demo-1"
        for step in (4, 7):
            write_checkpoint(folder / "checkpoints" / f"step-{step:08d}")
        newest = folder / "checkpoints" / "step-00000007"
        for name in ("demo-1", str(folder), str(folder / "checkpoints"), str(newest)):
            assert find_weights(name, tmp_path) == newest

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("nobody", "nobody: there is no such directory, and no such job in"),
            ("jobs/empty", "has no whole checkpoint"),
            ("jobs/other", "neither a checkpoint"),
        ],
    )
    def test_what_is_neither_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str
    ) -> None:
        (tmp_path / "jobs" / "empty" / "checkpoints").mkdir(parents=True)
        (tmp_path / "jobs" / "other").mkdir()
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ConfigError, match=words):
            find_weights(name, tmp_path)
