"""A checkpoint knows what it was made of: whatever differs is named, and what is newer than it is no difference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from services.common.checkpoints import fingerprint as module
from services.common.checkpoints.fingerprint import Identity, identity_of
from services.common.models.directory import ModelInfo
from tests.unit.learner.scored_groups import job_spec


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shape = ModelInfo("LlamaForCausalLM", 2, 4, 2, 64, 128, 256, 512, tie_word_embeddings=True)
    monkeypatch.setattr(module, "inspect_model", lambda _: shape)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)) * 40_000)
    return tmp_path


def of(model: Path, **sections: object) -> Identity:
    return identity_of("job", job_spec(**sections), model, "data-1")


def test_other_weights_another_tokenizer_and_other_data_are_each_noticed(model: Path) -> None:
    before = of(model)
    weights = model / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(bytes(byte ^ 1 for byte in data[:1]) + data[1:])
    assert of(model).weights != before.weights
    weights.write_bytes(data + b"\0")
    assert of(model).weights != before.weights
    weights.write_bytes(data)
    assert of(model) == before
    (model / "tokenizer.json").write_text("{ }")
    assert of(model).tokenizer != before.tokenizer
    assert identity_of("job", job_spec(), model, "data-2").dataset != before.dataset


def test_every_setting_that_differs_is_named_with_both_values(model: Path) -> None:
    saved = of(model).state()
    now = of(model, learner={"lr": 0.5}, off_policy={"max_off_policy_steps": 7})
    assert now.differences(saved) == [
        "learner.lr: 1e-06 there, 0.5 here",
        "off_policy.max_off_policy_steps: 2 there, 7 here",
    ]
    assert replace(now, job_id="other").differences(saved)[0] == "job_id: job there, other here"


def test_a_setting_that_the_checkpoint_does_not_know_yet_is_no_difference(model: Path) -> None:
    identity = of(model)
    saved = identity.state()
    del saved["spec"]["learner"]["threads_per_rank"]
    assert identity.differences(saved) == []
    saved["spec"]["learner"]["gone_since"] = 1
    assert identity.differences(saved) == ["learner.gone_since: 1 there, unknown here"]
