"""Tasks of a job, in the order in which the learner issues them: the same for every side."""

from __future__ import annotations

from pathlib import Path

from services.common.config.settings import Settings
from services.common.data.bounds import DataBounds
from services.common.data.order import task_index
from services.common.data.record import TaskRecord
from services.common.data.source import open_within
from services.common.spec.job import JobSpec

MOST_TASKS = 10_000


def tasks_of(spec: JobSpec, most: int = MOST_TASKS) -> list[TaskRecord]:
    """The first training tasks of a job whose data are named by an absolute path. Raises DataError when they cannot be read."""
    train = spec.data.train
    source = open_within(train, [Path(train.source).parent], DataBounds.of(Settings()), field="data.train")
    size = len(source)
    indices = [task_index(spec.data.seed, n, size, spec.data.shuffle) for n in range(min(size, most))]
    source.expect(indices)
    return [source[index] for index in indices]


def chat_of(task: TaskRecord) -> list[dict[str, str]]:
    """The prompt as libraries take it."""
    return [{"role": message.role, "content": message.content} for message in task.prompt]
