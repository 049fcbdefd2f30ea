"""The learner checks the models of every role again before a rank is started: admission may not have had the time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.common.config.settings import Settings
from services.common.errors import ModelError
from services.common.spec.job import JobSpec
from services.learner.groups.sources import Sources
from tests.unit.small_models import LLAMA


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """A home with an actor, a larger critic, and a model of other tokens."""
    made = Settings(home=tmp_path)
    for name, change in {"actor": {}, "large": {"num_hidden_layers": 3}, "other": {"vocab_size": 128}}.items():
        folder = made.models_dir / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(LLAMA | change))
        (folder / "model.safetensors").write_bytes(b"")
        (folder / "tokenizer.json").write_text("{}")
        (folder / "chat_template.jinja").write_text("{{ messages }}")
    return made


def check(settings: Settings, **sections: Any) -> None:
    document: dict[str, Any] = {
        "model": {"path": "actor"},
        "data": {"train": {"source": "tasks.jsonl"}},
        "rollout": {"rollout_max_tokens": 8},
        "algorithm": {"preset": "ppo"},
        "critic": {},
        "reference": {},
    }
    spec = JobSpec.model_validate(document | sections)
    Sources(spec.model_dump_json(), settings.public()).check_model()


def test_roles_that_fit_the_actor_pass(settings: Settings) -> None:
    check(settings)
    check(settings, critic={"path": "large"}, reference={"path": "actor"})


@pytest.mark.parametrize("role", ["critic", "reference"])
@pytest.mark.parametrize("path", ["other", "missing"])
def test_a_role_that_does_not_fit_or_is_not_there_is_named(settings: Settings, role: str, path: str) -> None:
    with pytest.raises(ModelError, match=rf"^{role}\.path: "):
        check(settings, **{role: {"path": path}})


def test_layers_that_the_ranks_do_not_divide_name_the_role(settings: Settings) -> None:
    with pytest.raises(
        ModelError, match=r"^learner\.pipeline_parallel_size: 2 does not divide critic\.path's 3 layers"
    ):
        check(settings, critic={"path": "large"}, learner={"pipeline_parallel_size": 2})
