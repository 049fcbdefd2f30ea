"""A rank that computes a journal's episodes with the weights that sampled them, as they are and with their observed tokens changed.

It writes the log-probs of both as arrays, and the figures of a training step on them.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from services.common.config.settings import Platform
from services.common.jobs.folder import SPEC_FILE
from services.common.models.roles import RoleModels
from services.common.spec.job import parse_spec
from services.learner.megatron.platform import prepare
from services.learner.storage.folder import JOURNAL_DIR

torch.set_num_threads(1)
prepare(Platform.CPU)

import torch.distributed as dist  # noqa: E402  Megatron comes after prepare

from services.learner.groups.batch import Batch  # noqa: E402
from services.learner.groups.sequence import Sequence  # noqa: E402
from services.learner.ranks.loop import build_trainer  # noqa: E402
from services.learner.storage.journal import Journal  # noqa: E402

OTHER = 7
"""A token in place of each observed one."""


def misheard(sequence: Sequence) -> Sequence:
    """The sequence as a learner would have it that takes other tokens for what was observed."""
    tokens = sequence.tokens.copy()
    tokens[sequence.prompt_len :][~sequence.loss_mask] = OTHER
    return replace(sequence, tokens=tokens)


def main(folder: Path, model_dir: Path, out: Path) -> None:
    """Of the journal's first record."""
    spec = parse_spec((folder / SPEC_FILE).read_text())
    record = next(iter(Journal(folder / JOURNAL_DIR).records()))
    sequences = Batch.of_payloads(record.groups, spec).sequences
    trainer = build_trainer(spec, RoleModels(model_dir), Platform.CPU)
    logprobs = np.concatenate(trainer.logprobs(sequences))
    changed = np.concatenate(trainer.logprobs([misheard(one) for one in sequences]))
    np.savez(out / "logprobs.npz", logprobs=logprobs, misheard=changed)
    (out / "stats.json").write_text(json.dumps(trainer.train(sequences).as_record()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
