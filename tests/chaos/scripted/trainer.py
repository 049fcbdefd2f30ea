"""Stands in for services/learner/training/trainer.py, the one module of the learner that computes. Everything around it is real."""

from __future__ import annotations

import json
import math
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from services.common.checkpoints.manifest import WrittenFile
from services.learner.groups.sequence import Sequence
from services.learner.training.background import BackgroundWriter
from services.learner.training.collectives import gather_json
from services.learner.training.pools import ACTOR, Pools
from services.learner.training.rendezvous import join_process_group
from services.learner.training.stats import StepStats
from tests.chaos.scripted import lifelike, script

__all__ = ["StepStats", "Trainer"]


def rank_file(rank: int) -> str:
    """A rank's part of a checkpoint."""
    return f"rank-{rank}.json"


class Trainer:
    """One rank. All ranks compute the same chain."""

    def __init__(self, model_dir: Path, spec: Any, backend: Any, loss_fn: Any, **_: Any) -> None:
        """Joins the other ranks.

        Raises:
            KeyError, ValueError: the model's weights are not what its configuration says, as the real one finds when it loads them.
        """
        del spec, backend, loss_fn
        lifelike.load(model_dir)
        self._finite = lifelike.is_finite(model_dir)
        join_process_group("gloo", timedelta(minutes=5))
        self.device = torch.device("cpu")
        self.pools = Pools([[ACTOR]], 0, self.device)
        self.step = 0
        self._state = script.GENESIS
        self._writer = BackgroundWriter()

    def train(self, sequences: list[Sequence]) -> StepStats:
        """One link of the chain."""
        self.step += 1
        self._state = script.advance(self._state, sequences)
        skipped = "" if self._finite else "the model's weights are not finite"
        return StepStats(
            step=self.step, loss=0.0 if self._finite else math.nan, grad_norm=1.0, lr=1e-3, tokens=sum(s.response_len for s in sequences),
            sequences=len(sequences), micro_batches=1, padding=0.0, skipped=skipped,
        )  # fmt: skip

    def finite(self) -> bool:
        """Whether the weights are finite; the same on all ranks."""
        return self._finite

    def export(self, *, copy: bool = True) -> dict[str, torch.Tensor] | None:
        """The weights, on rank 0."""
        del copy
        if dist.get_rank() != 0:
            return None
        weights = script.weights(self._state)
        if not self._finite:
            weights = {name: array * math.nan for name, array in weights.items()}
        return {name: torch.from_numpy(array) for name, array in weights.items()}

    def save(self, folder: Path, *, export: bool = False) -> None:
        """Begins to write this rank's file, beside the training."""
        del export
        document = {"step": self.step, "state": self._state.hex(), "ballast": os.urandom(2048).hex()}
        path = folder / rank_file(dist.get_rank())
        self._writer.start(lambda: [write_file(path, document)])

    def saved(self, *, wait: bool = False) -> list[dict[str, Any]] | None:
        """Every rank's report of the last `save`; None while one of them still writes."""
        if wait:
            self._writer.join()
        reports = gather_json(self._writer.report, self.device)
        return None if None in reports else reports

    def load(self, folder: Path, *, optimizer: bool = True, rng: bool = True) -> None:
        """Continues where `save` was called."""
        del optimizer, rng
        document = json.loads((folder / rank_file(dist.get_rank())).read_text())
        self.step, self._state = int(document["step"]), bytes.fromhex(document["state"])
        dist.barrier()


def write_file(path: Path, document: dict[str, Any]) -> WrittenFile:
    """A rank's file, durable."""
    data = json.dumps(document).encode()
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return WrittenFile(path.name, len(data), xxhash.xxh3_128_hexdigest(data))
