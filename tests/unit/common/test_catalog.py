"""The catalog names models and files as a job names them, and nothing in a directory can stop it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from services.common import catalog
from services.common.catalog import read_catalog
from services.common.config.settings import Settings
from services.common.models.directory import resolve_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def model(folder: Path, config: str = json.dumps({"architectures": ["LlamaForCausalLM"]})) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(config)
    return folder


def file(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}\n")
    return path


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(
        _env_file=None, home=tmp_path / "home", model_roots=[tmp_path / "models"], data_roots=[tmp_path / "data"]
    )  # type: ignore[call-arg]


def test_every_model_is_named_as_a_job_names_it(tmp_path: Path, settings: Settings) -> None:
    made = [
        model(settings.models_dir / "tiny"),
        model(tmp_path / "models" / "family" / "large"),
        model(tmp_path / "models" / "tiny"),
    ]
    fetched = model(settings.hub_folder.roots[0] / "hf" / "org" / "name" / COMMIT)
    found = read_catalog(settings).models
    assert [entry.name for entry in found] == ["tiny", "family/large", str(made[2]), f"hf:org/name@{COMMIT}"]
    assert [resolve_model(entry.name, settings) for entry in found] == [*made, fetched]
    assert {entry.architecture for entry in found} == {"LlamaForCausalLM"}


def test_data_files_are_those_that_a_job_can_read(tmp_path: Path, settings: Settings) -> None:
    for name in ("demo/train.jsonl", "demo/notes.txt", ".hidden/train.jsonl", "a/b/c/d/deep.jsonl"):
        file(settings.home / "data" / name)
    file(tmp_path / "data" / "own.parquet")
    file(settings.hub_folder.roots[1] / "hf" / "org" / "set" / COMMIT / "main" / "train.parquet")
    names = [entry.name for entry in read_catalog(settings).data]
    assert names == ["demo/train.jsonl", "own.parquet", f"hf:org/set@{COMMIT}/main/train.parquet"]


@pytest.mark.parametrize("config", ["", "[]", "{", '{"architectures": 3}', '{"architectures": []}'])
def test_a_broken_config_hides_no_model(settings: Settings, config: str) -> None:
    model(settings.models_dir / "broken", config)
    model(settings.models_dir / "good")
    assert [(entry.name, entry.architecture) for entry in read_catalog(settings).models] == [
        ("broken", ""),
        ("good", "LlamaForCausalLM"),
    ]


def test_more_than_the_limit_is_said_to_be_truncated(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "MAX_ENTRIES", 2)
    for name in "abc":
        model(settings.models_dir / name)
    found = read_catalog(settings)
    assert ([entry.name for entry in found.models], found.truncated) == (["a", "b"], True)


def test_a_circle_of_links_ends(settings: Settings) -> None:
    model(settings.models_dir / "tiny")
    (settings.models_dir / "circle").symlink_to(settings.models_dir)
    assert [entry.name for entry in read_catalog(settings).models] == ["tiny"]


def test_an_installation_without_anything_has_verifiers_only(settings: Settings) -> None:
    found = read_catalog(settings)
    assert replace(found, verifiers=[]) == catalog.Catalog([], [], [], truncated=False)
    assert "gsm8k" in found.verifiers
