"""Held-out tasks are those that training never asks: what stands in the training source too is left out."""

from __future__ import annotations

import logging

from services.common.data import TaskRecord, TaskSource
from services.common.errors import DataError

log = logging.getLogger(__name__)

MAX_COMPARED = 200_000
"""Training tasks that are compared at the most; of a larger source only so many, and the log says so."""


class HeldOut:
    """The first `tasks` rows of the held-out source that are not among the training tasks."""

    def __init__(self, source: TaskSource, train: TaskSource, tasks: int) -> None:
        """Compares prompts.

        Raises:
            DataError: every held-out task is a training task.
        """
        compared = min(len(train), MAX_COMPARED)
        if compared < len(train):
            log.warning("held-out tasks are compared with the first %d of %d training tasks only", compared, len(train))
        known = {train[index].prompt for index in range(compared)}
        self._source = source
        self._rows: list[int] = []
        for row in range(len(source)):
            if len(self._rows) == tasks:
                break
            if source[row].prompt not in known:
                self._rows.append(row)
        if not self._rows:
            raise DataError("data.eval: every one of its tasks is a training task too: nothing is held out")

    def __len__(self) -> int:
        """Held-out tasks."""
        return len(self._rows)

    def __getitem__(self, index: int) -> TaskRecord:
        """The held-out task `index`."""
        return self._source[self._rows[index]]
