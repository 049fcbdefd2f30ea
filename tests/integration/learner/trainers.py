"""Trainers of the tests' ranks, on the back end that the spec names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from services.common.config.settings import Platform
from services.common.spec.job import JobSpec
from services.learner.algorithms.losses import LossFunction
from services.learner.backends import open_backend
from services.learner.training.backend import Model, StateCopy
from services.learner.training.trainer import Trainer


def trainer_of(
    model: Path, spec: JobSpec, loss: LossFunction, *, critic_dir: Path | None = None, reference_dir: Path | None = None
) -> Trainer:
    """This rank's trainer."""
    backend = open_backend(spec, Platform.CPU)
    return Trainer(model, spec, backend, loss, critic_dir=critic_dir, reference_dir=reference_dir)


def part_of(model: Model | None) -> Any:
    """A model's part on Megatron."""
    found: Any = model
    return found.part


def roles_of(trainer: Trainer) -> Any:
    """Megatron's roles of a trainer."""
    backend: Any = trainer._backend
    return backend._roles


def state_copy(trainer: Trainer) -> StateCopy:
    """What a checkpoint of this rank would hold."""
    return trainer._backend.copy_state(trainer.step, None)
