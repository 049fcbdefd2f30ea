"""The trial of a reward model's directory: what is no whole, safe classifier with one output is refused, by file."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from services.common.config.settings import Settings
from services.common.errors import ConfigError, ModelError
from services.common.models.classifier import check_classifier
from services.common.spec.job import JobSpec
from services.gateway.admission.checks import JobChecks
from tests.tiny_classifier import write_tiny_classifier


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as raised:
        check_classifier(str(folder), time.monotonic() + 20.0)
    return str(raised.value)


def test_a_whole_classifier_passes(tmp_path: Path) -> None:
    check_classifier(str(write_tiny_classifier(tmp_path / "rm")), time.monotonic() + 20.0)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "is no reward model"),
        ({"architectures": ["ZebraForSequenceClassification"]}, "model_type 'llama' has no Zebra"),
        ({"model_type": "zebra"}, "config.json"),
        ({"id2label": {"0": "bad", "1": "good"}}, "has 2 labels"),
        ({"auto_map": {"AutoModel": "code.Model"}}, "remote code"),
        ({"quantization_config": {}}, "quantized"),
        ({"vocab_size": 16}, "the model has 16 tokens"),
        ({"vocab_size": "many"}, "vocab_size"),
    ],
)
def test_a_config_of_another_kind_is_refused(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    assert words in refusal(write_tiny_classifier(tmp_path / "rm", **config))


@pytest.mark.parametrize(
    ("name", "words"),
    [("modeling.py", "must not contain code"), ("head.bin", "pickled files"), ("extra.safetensors", "lies beside")],
)
def test_code_pickles_and_stray_weights_are_refused(name: str, words: str, tmp_path: Path) -> None:
    folder = write_tiny_classifier(tmp_path / "rm")
    (folder / name).write_text("")
    assert words in refusal(folder)


def test_weights_that_are_not_finite_or_have_no_head_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_classifier(tmp_path / "rm")
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"score.weight": np.full((1, 32), np.nan, np.float32)}, folder / "model.safetensors")
    assert "score.weight has a value that is not finite" in refusal(folder)
    del weights["score.weight"]
    save_file(weights, folder / "model.safetensors")
    assert "no head with one output" in refusal(folder)


def test_a_directory_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_classifier(tmp_path / "rm")
    (folder / "chat_template.jinja").unlink()
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": None}))
    assert "has no chat template" in refusal(folder)


def test_a_job_that_names_a_wrong_directory_gets_its_own_field(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home")
    write_tiny_classifier(settings.models_dir / "rm")
    write_tiny_classifier(settings.models_dir / "two", id2label={"0": "bad", "1": "good"})
    paths = {"good": "rm", "missing": "mr", "outside": "../..", "labels": "two"}
    spec = JobSpec.model_validate(
        {
            "model": {"path": "actor"},
            "data": {"train": {"source": "tasks.jsonl"}},
            "reward": {"reward_models": {name: {"path": path} for name, path in paths.items()}},
        }
    )
    checks = JobChecks(spec.model_dump_json(), settings.public())
    checks.reward_model("good", 20.0)
    for name in ("missing", "outside", "labels"):
        with pytest.raises(ConfigError) as raised:
            checks.reward_model(name, 20.0)
        assert [problem.field for problem in raised.value.problems] == [f"reward.reward_models.{name}.path"]
