"""Tensors of a model: names and shapes that a new version must bring, so that no old tensor stays and none breaks the load midway."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from services.common.errors import ModelError
from services.common.models.directory import INDEX, SINGLE
from services.common.models.weight_files import BUFFERS, EMBEDDING, LM_HEAD

Shapes = dict[str, tuple[int, ...]]


def model_shapes(model_dir: Path) -> Shapes:
    """Names and shapes of the tensors in a model's safetensors files, and of the output head.

    Raises:
        ModelError: there are no such files, or they cannot be read; names the file.
    """
    index = model_dir / INDEX
    files = [model_dir / SINGLE]
    if index.is_file():
        try:
            files = [model_dir / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{index}: cannot be read: {error}") from error
    found = {name: shape for file in files for name, shape in file_shapes(file).items()}
    shapes = {name: shape for name, shape in found.items() if not name.endswith(BUFFERS)}
    if LM_HEAD not in shapes and EMBEDDING in shapes:
        shapes[LM_HEAD] = shapes[EMBEDDING]
    return shapes


def file_shapes(path: Path) -> Shapes:
    """Names and shapes of the tensors in one safetensors file. Raises ModelError when it cannot be read."""
    try:
        with safe_open(path, framework="numpy") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  not a mapping
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error


def shape_differences(wanted: Shapes, got: Shapes) -> list[str]:
    """Differences of `got` from `wanted`: tensors that are missing, unknown or of another shape; one line each."""
    lines = [f"{name} is missing" for name in sorted(wanted.keys() - got.keys())]
    lines += [f"{name} is not in the model" for name in sorted(got.keys() - wanted.keys())]
    both = sorted(wanted.keys() & got.keys())
    return lines + [f"{name} is {got[name]}, not {wanted[name]}" for name in both if wanted[name] != got[name]]
