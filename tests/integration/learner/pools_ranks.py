"""What every rank of one placement of the roles runs; the first of all writes down what came out.

`python pools_ranks.py ROOT NAME SIZES ROLES [FOLDER ...] [fsdp2]`: `ROLES`, joined by commas, have ranks of their own; FOLDER: checkpoints
of other placements, from each of which the job goes on too.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from services.common.models.roles import RoleModels
from services.common.spec.job import JobSpec
from services.learner.training.trainer import Trainer
from tests.integration.learner.roles_ranks import SIZES, Bench, files_of, spec_of
from tests.integration.learner.trainers import digest

SAVED_AFTER = 2
"""Steps: the reference has followed the actor once, and the last step is trained after the load."""


def job(sizes: str, own: str) -> JobSpec:
    """PPO with an adaptive KL to a reference that follows the actor, warmed up for no step."""
    placed: dict[str, Any] = {role: {"placement": "own"} for role in own.split(",") if role}
    return spec_of("ppo", SIZES[sizes], "shared", **placed)


def said_of(trainer: Trainer, bench: Bench) -> dict[str, Any]:
    """What the roles say of a batch, and the weights: digests, the same on every rank but the weights."""
    batch = bench.batches("llama")[0]
    columns = {
        "logprobs": trainer.logprobs(batch),
        "values": trainer.values(batch),
        "reference": trainer.reference_logprobs(batch),
    }
    weights = trainer.export() or {}
    said = {name: [digest(torch.from_numpy(part)) for part in column] for name, column in columns.items()}
    return said | {"weights": {name: digest(value) for name, value in weights.items()}, "finite": trainer.finite()}


def train_and_save(bench: Bench, spec: JobSpec, folder: Path) -> dict[str, Any]:
    """Every step's record; a checkpoint before the last one."""
    trainer = bench.build(spec)
    records = []
    for step, batch in enumerate(bench.batches("llama"), 1):
        records.append(trainer.train(batch).as_record())
        if step == SAVED_AFTER:
            trainer.save(folder, export=True)
            files_of(trainer)
    return {"records": records, **said_of(trainer, bench)}


def go_on(bench: Bench, spec: JobSpec, folder: Path) -> dict[str, Any]:
    """The last step, from a checkpoint."""
    trainer = bench.build(spec)
    trainer.load(folder)
    return {"records": [trainer.train(bench.batches("llama")[SAVED_AFTER]).as_record()], **said_of(trainer, bench)}


def begin_with(bench: Bench, spec: JobSpec, folder: Path, *, hugging_face: bool) -> dict[str, Any]:
    """A step from the weights of a checkpoint that has no role but the actor, by which the others begin with those."""
    trainer = bench.build(spec, RoleModels(bench.root / "llama"))
    trainer.load_weights(folder / "hf" if hugging_face else folder, hugging_face=hugging_face)
    return {"records": [trainer.train(bench.batches("llama")[0]).as_record()], **said_of(trainer, bench)}


def main(root: Path, name: str, sizes: str, own: str, others: list[Path]) -> None:
    """All that is asked of one placement."""
    bench, spec, folder = Bench(root, SIZES[sizes]), job(sizes, own), root / name
    said: dict[str, Any] = {"trained": train_and_save(bench, spec, folder)}
    said["loaded"] = {"itself": go_on(bench, spec, folder)}
    said["loaded"] |= {str(other): go_on(bench, spec, root / other) for other in others}
    plain = root / "plain"
    if not own:
        actor = bench.build(spec_of("m2po", SIZES[sizes], "shared"))
        actor.train(bench.batches("llama")[0])
        actor.save(plain, export=True)
        files_of(actor)
    said["begun"] = {str(way): begin_with(bench, spec, plain, hugging_face=way) for way in (False, True)}
    said["files"] = sorted(path.name for path in folder.iterdir() if path.is_file())
    if bench.build(spec).pools.leads:
        (root / f"{name}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    root, name, sizes, own, *rest = sys.argv[1:]
    main(Path(root), name, sizes, own, [Path(folder) for folder in rest if folder not in {"megatron", "fsdp2"}])
