"""`millrace models`: a directory becomes a model that jobs may name, without anything in it that can run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from services.cli.main import app
from services.common.config.settings import Settings
from services.common.models.directory import inspect_model, resolve_model
from tests.tiny_model import write_tiny_model


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    write_tiny_model(folder)
    (folder / "pytorch_model.bin").write_bytes(b"pickled")
    (folder / "modeling_own.py").write_text("raise SystemExit")
    (folder / ".git").mkdir()
    return folder


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_an_added_directory_is_a_model_that_a_job_may_name_and_has_nothing_that_can_run(
    source: Path, home: Path
) -> None:
    assert run("models", "add", str(source), "--name", "own").stdout.strip() == "own is registered"
    path = resolve_model("own", Settings(home=home))
    assert inspect_model(path) == inspect_model_of(source)
    assert not {"pytorch_model.bin", "modeling_own.py", ".git"} & {entry.name for entry in path.iterdir()}
    (item,) = json.loads(run("models", "list", "--json").stdout)
    assert (item["reference"], item["architecture"], item["whole"]) == ("own", "LlamaForCausalLM", True)
    assert run("models", "list").stdout.split()[0] == "own"


def inspect_model_of(source: Path) -> object:
    clean = source.with_name("clean")
    shutil.copytree(source, clean, ignore=shutil.ignore_patterns("*.bin", "*.py", ".git"))
    return inspect_model(clean)


def test_a_base_model_is_registered_with_the_remark_that_its_job_needs_a_template(source: Path, home: Path) -> None:
    (source / "chat_template.jinja").unlink()
    (source / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    assert "base is registered; it has no chat template" in run("models", "add", str(source)).stdout
    assert resolve_model("base", Settings(home=home)).is_dir()


def test_what_cannot_be_trained_is_refused_by_its_own_path_and_leaves_nothing(source: Path, home: Path) -> None:
    (source / "config.json").write_text('{"architectures": ["T5ForConditionalGeneration"]}')
    refused = str(run("models", "add", str(source)).exception)
    assert refused.startswith(f"{source}/config.json: ")
    assert "T5ForConditionalGeneration" in refused
    assert list((home / "models").iterdir()) == []


@pytest.mark.parametrize(
    ("broken", "name", "message"),
    [
        ("model.safetensors", "own", "has its weights as pickles only (pytorch_model.bin)"),
        ("config.json", "own", "has no config.json"),
        (None, "../own", "--name: '../own' cannot be a model's name"),
        (None, "taken", "there is a model 'taken' already"),
    ],
)
def test_a_refusal_says_what_is_wrong(source: Path, home: Path, broken: str | None, name: str, message: str) -> None:
    (home / "models" / "taken").mkdir(parents=True)
    if broken:
        (source / broken).unlink()
    assert message in str(run("models", "add", str(source), "--name", name).exception)


def test_a_directory_that_is_not_there_is_named(home: Path, tmp_path: Path) -> None:
    refused = str(run("models", "add", str(tmp_path / "nowhere")).exception)
    assert f"{tmp_path / 'nowhere'} cannot be copied" in refused
    assert not (home / "models" / "nowhere").exists()
