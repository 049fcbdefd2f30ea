"""The loop that every rank runs:  command ─► train | publish | save | load ─► result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from services.learner.megatron.trainer import MegatronTrainer
from services.learner.ranks.client import IDLE, Ranks
from services.learner.ranks.commands import (
    Command,
    Finish,
    Finite,
    Idle,
    Load,
    LoadWeights,
    Publish,
    Save,
    Saved,
    Train,
    share,
)

COMMAND_WAIT_S = 5.0
"""Rank 0 waits this long for the head before it tells the others to go on waiting."""


def run_loop(trainer: MegatronTrainer, ranks: Ranks | None) -> None:
    """Does what the head says until it says Finish.

    consumes:     commands (rank 0 from the head, the others from rank 0)
    waits for:    a command, COMMAND_WAIT_S at a time
    unblocked by: the head
    produces:     results, on rank 0
    """
    while True:
        call = ranks.next(COMMAND_WAIT_S) if ranks is not None else None
        mine = (call.command if call is not None else IDLE) if ranks is not None else None
        command = share(mine, trainer.device)
        try:
            result = execute(trainer, command)
        except BaseException as error:
            if call is not None:
                call.result.set_exception(error)
            raise
        if call is not None:
            call.result.set_result(result)
        if isinstance(command, Finish):
            return


def execute(trainer: MegatronTrainer, command: Command) -> Any:  # noqa: ANN401  the caller knows what it asked for
    """Carries out one command on this rank."""
    match command:
        case Train(_, sequences):
            return trainer.train(sequences)
        case Finite():
            return trainer.finite()
        case Publish():
            return trainer.export()
        case Save(path, export):
            trainer.save(Path(path), export=export)
        case Saved():
            return trainer.saved()
        case Load(path, optimizer, rng):
            trainer.load(Path(path), optimizer=optimizer, rng=rng)
        case LoadWeights(path, hugging_face):
            trainer.load_weights(Path(path), hugging_face=hugging_face)
        case Idle() | Finish():
            pass
    return None
