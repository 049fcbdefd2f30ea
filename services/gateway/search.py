"""Search among jobs: filters and order of the runs table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from services.common.jobs.record import JobRow, JobState


class JobOrder(StrEnum):
    """What a list of jobs is ordered by."""

    SUBMITTED = "submitted"
    NAME = "name"
    STATE = "state"
    MODEL = "model"
    DATA = "data"
    STEP = "step"
    REWARD = "reward"
    BEST_SCORE = "best_score"
    RUN_TIME = "run_time"


@dataclass(frozen=True, slots=True)
class JobSearch:
    """What is wanted of jobs; what is not set selects nothing out."""

    tags: frozenset[str] = frozenset()
    state: JobState | None = None
    name: str = ""
    """Text in the id."""
    text: str = ""
    """Words, each of which is in the id, a tag, the notes, the model or the data, in any case."""
    order: JobOrder = JobOrder.SUBMITTED
    ascending: bool = False

    def select(self, rows: Iterable[JobRow], now: float) -> list[JobRow]:
        """The wanted jobs in order; those that lack what it goes by come last. `rows`: newest first; `now`: Unix seconds."""
        words = self.text.casefold().split()
        found = [row for row in rows if self._wants(row, words)]
        if self.order is JobOrder.SUBMITTED:
            return found[::-1] if self.ascending else found
        valued = [(key, row) for row in found if (key := _key(row, self.order, now)) is not None]
        valued.sort(key=lambda item: item[0], reverse=not self.ascending)
        return [row for _, row in valued] + [row for row in found if _key(row, self.order, now) is None]

    def _wants(self, row: JobRow, words: list[str]) -> bool:
        if not (self.tags.issubset(row.tags) and self.state in {None, row.state} and self.name in row.id):
            return False
        told = " ".join((row.id, *row.tags, row.notes, row.model, row.data)).casefold() if words else ""
        return all(word in told for word in words)


def _key(row: JobRow, order: JobOrder, now: float) -> tuple[float, str] | None:
    """Number and text to order by; None where the job lacks it."""
    if order in {JobOrder.NAME, JobOrder.STATE, JobOrder.MODEL, JobOrder.DATA}:
        text = str(getattr(row, order)).casefold()
        return (0.0, text) if text else None
    if order is JobOrder.RUN_TIME:
        number = None if row.started_at is None else (row.finished_at or now) - row.started_at
    else:
        number = getattr(row, order)
    return None if number is None else (float(number), "")
