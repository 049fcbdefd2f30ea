"""Job files and `--set`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.cli.overrides import apply_change, load_job
from services.common.errors import ConfigError


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("learner.lr=3e-4", {"learner": {"lr": 3e-4, "steps": 5}}),
        ("learner.lr=1e-5", {"learner": {"lr": 1e-5, "steps": 5}}),
        ("name=on", {"learner": {"steps": 5}, "name": "on"}),
        ("learner.steps=7", {"learner": {"steps": 7}}),
        ("name=demo", {"learner": {"steps": 5}, "name": "demo"}),
        ("eval.enabled=true", {"learner": {"steps": 5}, "eval": {"enabled": True}}),
        ('reward.verifiers={"*": math}', {"learner": {"steps": 5}, "reward": {"verifiers": {"*": "math"}}}),
        ("a.b.c=x=y", {"learner": {"steps": 5}, "a": {"b": {"c": "x=y"}}}),
        ("model.max_model_len=null", {"learner": {"steps": 5}, "model": {"max_model_len": None}}),
    ],
)
def test_a_change_sets_one_value(change: str, expected: dict[str, Any]) -> None:
    document: dict[str, Any] = {"learner": {"steps": 5}}
    apply_change(document, change)
    assert document == expected


@pytest.mark.parametrize("change", ["learner.lr", "=3", "learner..lr=3", "learner.steps.x=1", "a=[", ".a=1"])
def test_a_change_that_cannot_be_made_is_named(change: str) -> None:
    with pytest.raises(ConfigError, match=r"^--set "):
        apply_change({"learner": {"steps": 5}}, change)


def test_an_empty_section_can_be_filled() -> None:
    document: dict[str, Any] = {"learner": None}
    apply_change(document, "learner.steps=3")
    assert document == {"learner": {"steps": 3}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "must be a mapping"),
        ("a: [", "is not valid YAML"),
        ("a: 1\na: 2", r"key 'a' is given twice \(line 2\)"),
        ("x: .nan", "JSON cannot carry"),
    ],
)
def test_an_unusable_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"job\.yaml: .*{message}"):
        load_job(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.yaml: cannot be read"):
        load_job(tmp_path / "gone.yaml")


def test_the_text_of_a_template_file_beside_the_job_is_taken(tmp_path: Path) -> None:
    (tmp_path / "base.jinja").write_text("{{ messages }}")
    (tmp_path / "job.yaml").write_text("model: {path: base, chat_template: base.jinja}")
    assert load_job(tmp_path / "job.yaml")["model"]["chat_template"] == "{{ messages }}"
    with pytest.raises(ConfigError, match=r"model\.chat_template: .*absent\.jinja cannot be read"):
        load_job(tmp_path / "job.yaml", ["model.chat_template=absent.jinja"])
    given = load_job(tmp_path / "job.yaml", ["model.chat_template='{{ messages }}!'"])
    assert given["model"]["chat_template"] == "{{ messages }}!"
