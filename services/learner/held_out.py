"""Held-out tasks are those that training never asks: what stands in the training source too is left out."""

from __future__ import annotations

import logging

from services.common.data import TaskSource
from services.common.errors import DataError

log = logging.getLogger(__name__)

MAX_COMPARED = 200_000
"""Training tasks that are compared at the most; of a larger source only so many, and the log says so."""


def held_out_rows(source: TaskSource, train: TaskSource, tasks: int) -> list[int]:
    """The first `tasks` rows of the held-out source whose prompts are not among the training tasks'.

    Raises:
        DataError: every held-out task is a training task.
    """
    compared = min(len(train), MAX_COMPARED)
    if compared < len(train):
        log.warning("held-out tasks are compared with the first %d of %d training tasks only", compared, len(train))
    known = {train[index].prompt for index in range(compared)}
    rows: list[int] = []
    for row in range(len(source)):
        if len(rows) == tasks:
            break
        if source[row].prompt not in known:
            rows.append(row)
    if not rows:
        raise DataError("data.eval: every one of its tasks is a training task too: nothing is held out")
    return rows
