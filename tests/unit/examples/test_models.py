"""The demo's models are made once per recipe, and whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from examples.demo.charlm_recipe import TinyRecipe
from examples.demo.models import MANIFEST, build_once, main, make_tiny
from services.common.errors import ModelError

BRIEF = TinyRecipe(hidden_size=64, intermediate_size=64, heads=2, demonstrations=256, steps=3, batch_size=32)
RECIPE: dict[str, Any] = {"model": "a", "steps": 1}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("models") / "tiny"
    assert make_tiny(out, BRIEF)
    return out


class Builder:
    """Writes one file and counts."""

    def __init__(self, text: str = "weights") -> None:
        self.text = text
        self.calls = 0

    def __call__(self, folder: Path) -> None:
        self.calls += 1
        (folder / "model.safetensors").write_text(self.text)


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()}


def test_a_finished_model_is_left_alone(tiny: Path) -> None:
    before = snapshot(tiny)
    assert not make_tiny(tiny, BRIEF)
    assert snapshot(tiny) == before


def test_the_same_recipe_gives_the_same_weights_and_another_seed_does_not(tiny: Path, tmp_path: Path) -> None:
    weights = (tiny / "model.safetensors").read_bytes()
    make_tiny(tmp_path / "again", BRIEF)
    make_tiny(tmp_path / "other", replace(BRIEF, seed=1))
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == weights
    assert (tmp_path / "other" / "model.safetensors").read_bytes() != weights


def test_a_changed_recipe_is_built_again(tmp_path: Path) -> None:
    out = tmp_path / "model"
    first, second = Builder("one"), Builder("two")
    assert build_once(out, RECIPE, first)
    assert build_once(out, {**RECIPE, "steps": 2}, second)
    assert (first.calls, second.calls) == (1, 1)
    assert (out / "model.safetensors").read_text() == "two"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    "tear",
    [
        lambda out: (out / MANIFEST).unlink(),
        lambda out: (out / MANIFEST).write_text('{"hash": "'),
        lambda out: (out / "model.safetensors").write_text("weig"),
        lambda out: (out / "model.safetensors").unlink(),
    ],
    ids=["no manifest", "half a manifest", "short file", "lost file"],
)
def test_a_torn_directory_is_built_again(tmp_path: Path, tear: Callable[[Path], object]) -> None:
    out = tmp_path / "model"
    build_once(out, RECIPE, Builder())
    tear(out)
    assert build_once(out, RECIPE, Builder())
    assert (out / "model.safetensors").read_text() == "weights"
    assert not build_once(out, RECIPE, Builder())


def test_files_that_are_not_ours_are_kept_aside(tmp_path: Path) -> None:
    out = tmp_path / "model"
    out.mkdir()
    (out / "thesis.tex").write_text("three years")
    build_once(out, RECIPE, Builder())
    assert (tmp_path / "model.aside-1" / "thesis.tex").read_text() == "three years"
    assert not (out / "thesis.tex").exists()


def test_a_build_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    out = tmp_path / "model"
    build_once(out, RECIPE, Builder())

    def fail(folder: Path) -> None:
        (folder / "model.safetensors").write_text("half")
        raise ModelError("no wheel")

    with pytest.raises(ModelError, match="no wheel"):
        build_once(out, {**RECIPE, "steps": 2}, fail)
    assert not build_once(out, RECIPE, Builder())
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_others_may_read_the_model(tiny: Path) -> None:
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in tiny.iterdir())
    assert tiny.stat().st_mode & 0o055 == 0o055


def test_the_manifest_names_recipe_and_sizes(tiny: Path) -> None:
    manifest = json.loads((tiny / MANIFEST).read_text())
    assert manifest["recipe"]["wrong_share"] == BRIEF.wrong_share
    assert set(manifest["bytes"]) == {path.name for path in tiny.iterdir()} - {MANIFEST}


def test_a_file_in_the_way_is_a_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["tiny", "--out", str(tmp_path / "file")]) == 2
    assert "file: is not a directory" in capsys.readouterr().err
