"""What every rank of the tests of experts runs: each layout that the number of ranks allows. Rank 0 writes down what came out."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from services.common.spec.job import JobSpec
from services.common.spec.learner import Recompute
from services.common.spec.rollout import DType
from tests.integration.learner.experts_cases import COEFFICIENT, MODELS, QUICK
from tests.integration.learner.experts_cases import LAYOUTS as SIZES
from tests.integration.learner.trainer_cases import STEPS
from tests.integration.learner.trainer_ranks import (
    BASE,
    dapo,
    files_of,
    resume,
    sequences,
    variant,
    write,
    write_loaded,
)
from tests.integration.learner.trainers import run_layouts, trainer_of

LAYOUTS: dict[int, dict[str, JobSpec]] = {
    1: {"one": BASE},
    2: {
        "ep": variant(BASE, expert_parallel_size=2),
        "ep_cp": variant(BASE, expert_parallel_size=2, context_parallel_size=2, use_distributed_optimizer=True),
    },
    4: {
        "ep_pp": variant(BASE, expert_parallel_size=2, pipeline_parallel_size=2),
        "ep_dist": variant(BASE, expert_parallel_size=2, use_distributed_optimizer=True),
        "ep_4": variant(BASE, expert_parallel_size=4),
    },
}


def scenario(name: str, spec: JobSpec, root: Path, out: Path) -> dict[str, Any]:
    """All that is asked of one layout."""
    said: dict[str, Any] = {}
    for model in MODELS:
        trainer = trainer_of(root / model, spec, dapo)
        write_loaded(trainer, out / f"{name}.{model}")
        said[model] = {}
        for way, coefficient in (("plain", 0.0), ("balanced", COEFFICIENT)):
            chosen = variant(
                spec, shared_prompts=True, router_aux_loss_coef=coefficient, max_tokens_per_micro_batch=4096
            )
            trainer = trainer_of(root / model, chosen, dapo)
            said[model][way] = [trainer.train(sequences()).as_record() for _ in range(STEPS)]
            write(trainer.export(), out / f"{name}.{model}.{way}.safetensors")
    qwen = root / "qwen3_moe"
    said["split"] = []
    for i, learner in enumerate(splits()):
        trainer = trainer_of(qwen, variant(spec, **learner), dapo)
        said["split"].append(trainer.train(sequences()).as_record())
        write(trainer.export(), out / f"{name}.split{i}.safetensors")
    said["resume"] = {
        dtype: resume(qwen, variant(spec, shared_prompts=True, dtype=dtype), out / f"{name}.{dtype}")
        for dtype in (DType.FLOAT32, DType.BFLOAT16)
    }
    said["loaded"] = {other: loaded(qwen, spec, out / f"{other}.float32" / "saved") for other in saved_by_others(out)}
    return said


def splits() -> list[dict[str, Any]]:
    """The same step in other ways: rows, small micro-batches, shared prompts, activations computed again."""
    return [
        {"max_tokens_per_micro_batch": 4096},
        {"max_tokens_per_micro_batch": 60},
        {"max_tokens_per_micro_batch": 60, "shared_prompts": True},
        {"shared_prompts": True, "recompute": Recompute.SELECTIVE},
        {"shared_prompts": True, "recompute": Recompute.FULL},
    ]


def saved_by_others(out: Path) -> list[str]:
    """Layouts of fewer ranks, whose checkpoints are there."""
    ranks = dist.get_world_size()
    return [
        name for size, names in LAYOUTS.items() if size < ranks for name in names if (out / f"{name}.float32").is_dir()
    ]


def loaded(model: Path, spec: JobSpec, folder: Path) -> dict[str, Any]:
    """A step that goes on from a checkpoint of another layout; and whether it is saved and loaded in this one without a change."""
    trainer = trainer_of(model, variant(spec, shared_prompts=True), dapo)
    trainer.load(folder)
    again = folder.with_name(f"again.{trainer.layout.sizes['expert_parallel_size']}.{dist.get_world_size()}")
    trainer.save(again)
    files_of(trainer)
    stats = trainer.train(sequences()).as_record()
    second = trainer_of(model, variant(spec, shared_prompts=True), dapo)
    second.load(again)
    return {"stats": stats, "same": second.train(sequences()).as_record() == stats}


def main(root: Path, *, everything: bool) -> None:
    """The layouts of this number of ranks."""
    specs = LAYOUTS[int(os.environ["WORLD_SIZE"])]
    run_layouts(root, SIZES, QUICK, lambda name: scenario(name, specs[name], root, root / "out"), everything=everything)


if __name__ == "__main__":
    main(Path(sys.argv[1]), everything="everything" in sys.argv)
