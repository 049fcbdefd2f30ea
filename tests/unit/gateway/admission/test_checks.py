"""The checks of a spec's models, on real directories: a role's model is tried as `model.path` is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from examples.demo.charlm_tokenizer import VOCAB_SIZE, make_tokenizer, save_tokenizer
from services.common.config.settings import Settings
from services.common.errors import ConfigError
from services.common.models.directory import ModelInfo
from services.common.models.weight_files import needed_tensors
from services.common.spec.job import JobSpec
from services.gateway.admission.checks import JobChecks
from tests.unit.small_models import LLAMA

CONFIG = LLAMA | {"model_type": "llama", "vocab_size": VOCAB_SIZE, "eos_token_id": 1}


def make_model(folder: Path, **config: Any) -> Path:
    folder.mkdir(parents=True)
    settled = CONFIG | config
    info = ModelInfo(
        "LlamaForCausalLM", settled["num_hidden_layers"], 4, 2, 32, 48, settled["vocab_size"], 256, tie_word_embeddings=True
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(settled))
    save_tokenizer(make_tokenizer(256), folder)
    weights = {name: np.full(shape, 0.5, np.float32) for name, shape in needed_tensors(info, settled)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    made = Settings(home=tmp_path / "home")
    make_model(made.models_dir / "actor")
    return made


def checks(settings: Settings, **roles: Any) -> JobChecks:
    document: dict[str, Any] = {
        "model": {"path": "actor", "dtype": "float32"},
        "data": {"train": {"source": "tasks.jsonl"}},
        "rollout": {"rollout_max_tokens": 8},
        "algorithm": {"preset": "ppo"},
    }
    spec = JobSpec.model_validate(document | {"critic": {}, "reference": {}} | roles)
    made = JobChecks(spec.model_dump_json(), settings.public())
    made.model(20.0)
    return made


def refusal(settings: Settings, role: str, **roles: Any) -> tuple[str, str]:
    with pytest.raises(ConfigError) as caught:
        checks(settings, **roles).role(role, 20.0)
    [problem] = caught.value.problems
    return problem.field, problem.message


def test_a_larger_critic_is_tried_and_its_parameters_are_counted(settings: Settings) -> None:
    make_model(settings.models_dir / "critic", num_hidden_layers=4)
    made = checks(settings, critic={"path": "critic"})
    assert made.role("critic", 20.0)["parameters"] > made.model(20.0)["parameters"]


def test_the_actors_own_directory_is_not_tried_twice(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    made = checks(settings, reference={"path": str(settings.models_dir / "actor")})
    monkeypatch.setattr("services.gateway.admission.checks.check_model", None)
    assert made.role("reference", 20.0)["all_checked"]


@pytest.mark.parametrize("role", ["critic", "reference"])
def test_a_role_without_a_directory_names_its_own_field(settings: Settings, role: str) -> None:
    field, message = refusal(settings, role, **{role: {"path": "actro"}})
    assert field == f"{role}.path"
    assert message.startswith("there is no model 'actro'")
    assert refusal(settings, role, **{role: {"path": "../.."}})[0] == f"{role}.path"


@pytest.mark.parametrize("role", ["critic", "reference"])
def test_a_role_that_is_damaged_unsafe_or_of_other_tokens_names_its_own_field(settings: Settings, role: str) -> None:
    folder = make_model(settings.models_dir / "other")
    asked = {role: {"path": "other"}}
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"model.norm.weight": np.full(32, np.nan, np.float32)}, folder / "model.safetensors")
    field, message = refusal(settings, role, **asked)
    assert (field, "model.norm.weight" in message) == (f"{role}.path", True)
    (folder / "modeling.py").write_text("")
    field, message = refusal(settings, role, **asked)
    assert (field, "must not contain code" in message) == (f"{role}.path", True)
    make_model(settings.models_dir / "wide", vocab_size=VOCAB_SIZE + 8)
    field, message = refusal(settings, role, **{role: {"path": "wide"}})
    assert field == f"{role}.path"
    assert f"{VOCAB_SIZE + 8} vocabulary entries and model.path {VOCAB_SIZE}" in message
