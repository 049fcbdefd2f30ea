"""Ranks that train a job's journal from the first record to the last without a break, and save what they hold at each wanted step."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from services.common.config.settings import Platform
from services.common.jobs.folder import SPEC_FILE
from services.common.models.roles import RoleModels
from services.common.spec.job import parse_spec
from services.common.streams.codec import decode
from services.common.streams.limits import MIN_ENTRY_BYTES
from services.common.streams.types import ScoredGroup
from services.learner.megatron.platform import prepare
from services.learner.storage.folder import JOURNAL_DIR

torch.set_num_threads(1)
prepare(Platform.CPU)

import torch.distributed as dist  # noqa: E402  Megatron comes after prepare

from services.learner.groups.batch import assemble  # noqa: E402
from services.learner.groups.buffer import Judged  # noqa: E402
from services.learner.ranks.loop import build_trainer  # noqa: E402
from services.learner.storage.journal import Journal  # noqa: E402


def main(folder: Path, model_dir: Path, out: Path, steps: set[int]) -> None:
    """Every rank does the same."""
    spec = parse_spec((folder / SPEC_FILE).read_text())
    trainer = build_trainer(spec, RoleModels(model_dir), Platform.CPU)
    for record in Journal(folder / JOURNAL_DIR).records():
        if not record.groups:
            continue
        groups = [Judged(decode(ScoredGroup, payload, MIN_ENTRY_BYTES), payload, None) for payload in record.groups]
        trainer.train(assemble(groups, spec))
        if record.step in steps:
            trainer.save(out / str(record.step))
            while trainer.saved(wait=True) is None:
                pass
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), {int(step) for step in sys.argv[4:]})
