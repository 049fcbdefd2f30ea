"""Trainer and loop of every rank:  command ─► train | export | save | load ─► result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from services.common.config.settings import Platform
from services.common.models.roles import RoleModels
from services.common.spec.job import JobSpec
from services.learner.algorithms.losses import make_loss
from services.learner.backends import open_backend
from services.learner.ranks import commands
from services.learner.ranks.client import Ranks
from services.learner.training.tensor_file import write_version
from services.learner.training.trainer import Trainer

COMMAND_WAIT_S = 5.0
"""Rank 0 waits this long for the head before it sends the others `Idle`."""


def build_trainer(spec: JobSpec, models: RoleModels, platform: Platform) -> Trainer:
    """This rank's trainer, on the job's back end."""
    backend, loss = open_backend(spec, platform), make_loss(spec.algorithm)
    return Trainer(models.actor, spec, backend, loss, critic_dir=models.critic, reference_dir=models.reference)


def run_loop(trainer: Trainer, ranks: Ranks | None) -> None:
    """Executes the head's commands until `Finish`.

    consumes:     commands (rank 0 from the head, the others from rank 0)
    waits for:    a command, COMMAND_WAIT_S at a time
    unblocked by: the head
    produces:     results, on rank 0
    """
    while True:
        call = ranks.next(COMMAND_WAIT_S) if ranks is not None else None
        own = None if ranks is None else commands.Idle() if call is None else call.command
        command = commands.share(own, trainer.pools)
        try:
            result = execute(trainer, command)
        except BaseException as error:
            if call is not None:
                call.result.set_exception(error)
            raise
        if call is not None:
            call.result.set_result(result)
        if isinstance(command, commands.Finish):
            return


def execute(trainer: Trainer, command: commands.Command) -> Any:  # noqa: ANN401  the caller knows its result
    """Executes one command on this rank."""
    match command:
        case commands.Train(_, sequences):
            return trainer.train(sequences)
        case commands.Finite():
            return trainer.finite()
        case commands.Export():
            return trainer.export()
        case commands.Write(path, lineage, n):
            _write_weights(trainer, Path(path), lineage, n)
        case commands.Save(path, export):
            trainer.save(Path(path), export=export)
        case commands.Saved():
            return trainer.saved()
        case commands.Load(path, optimizer, rng):
            trainer.load(Path(path), optimizer=optimizer, rng=rng)
        case commands.LoadWeights(path, hugging_face):
            trainer.load_weights(Path(path), hugging_face=hugging_face)
        case commands.Idle() | commands.Finish():
            pass
    return None


def _write_weights(trainer: Trainer, path: Path, lineage: int, n: int) -> None:
    weights = trainer.export(copy=False)
    if weights is not None:
        write_version(path, lineage, n, weights)
