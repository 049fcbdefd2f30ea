"""A process that converts models to checkpoints of every layout and back, and loads them into a trainer of one rank."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from services.common.spec.rollout import DType
from services.learner.conversion.request import Conversion, Direction
from services.learner.conversion.worker import convert
from tests.integration.learner.layouts_cases import MODELS
from tests.integration.learner.trainer_ranks import BASE, dapo, variant
from tests.integration.learner.trainers import actor_of, part_of, trainer_of

torch.set_num_threads(1)

LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2)]
"""Sizes of TP and PP."""


def there_and_back(root: Path, model: Path, tp: int, pp: int) -> str:
    """Converts; the name of the result."""
    name = f"{model.name}.{tp}.{pp}"
    middle, out = root / f"{name}.megatron", root / f"{name}.hf"
    for direction, source, made in ((Direction.TO_MEGATRON, model, middle), (Direction.TO_HUGGING_FACE, middle, out)):
        made.mkdir()
        request = Conversion(
            direction, str(source), str(made), home=str(root), tensor_parallel_size=tp, pipeline_parallel_size=pp
        )
        convert(request, made)
    return name


def in_bfloat16(source: Path) -> Path:
    """A copy of a model whose tensors are of bfloat16."""
    target = source.with_name(f"{source.name}-bfloat16")
    target.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (target / file.name).write_bytes(file.read_bytes())
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def begun(model: Path, checkpoint: Path, dtype: DType) -> dict[str, Any]:
    """What a trainer has that begins with the checkpoint, and the source's names that are other than there."""
    trainer = trainer_of(model, variant(BASE, dtype=dtype), dapo)
    with torch.no_grad():
        for parameter in part_of(actor_of(trainer).model).chunk.parameters():
            parameter.zero_()
    trainer.load_weights(checkpoint, hugging_face=False)
    exported, source = trainer.export(), load_file(model / "model.safetensors")
    assert exported is not None
    different = [
        name for name, tensor in source.items() if not torch.equal(exported[name], tensor.to(exported[name].dtype))
    ]
    return {"step": trainer.step, "different": different}


def main(root: Path) -> None:
    """Converts every model, in both types, to every layout."""
    out = root / "converted"
    out.mkdir()
    said: dict[str, Any] = {"trips": [], "begun": {}}
    for name in MODELS:
        for model in (root / name, in_bfloat16(root / name)):
            trips = [there_and_back(out, model, tp, pp) for tp, pp in LAYOUTS]
            said["trips"] += trips
            for dtype in (DType.FLOAT32, DType.BFLOAT16):
                said["begun"][f"{trips[-1]} {dtype}"] = begun(model, out / f"{trips[-1]}.megatron", dtype)
    (root / "converted.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
