"""Trial of a job's data: opens it as the learner does, in a child process that can be killed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, TypedDict

from services.common.data.bounds import DataBounds
from services.common.data.environments import EnvironmentSource
from services.common.data.procedural import ProceduralSource
from services.common.data.source import open_within
from services.common.spec.data import DataSourceSpec

TRIED_TASKS = 16
"""Of a procedural source, spread over its tasks."""
MAX_NAMES = 1000


class SourceFacts(TypedDict):
    """Results of the trial, as MessagePack values."""

    fingerprint: str
    """Of content and settings, as checkpoints record it; empty where the file is too large to be read in the time."""
    tasks: int
    """Of a jsonl file that is too large to be read in the time, those that were found."""
    checked: int
    """Rows of a file that were checked; of a procedural source the tasks that were made."""
    all_checked: bool
    """Whether every row of a file was checked; always false for a procedural source."""
    data_sources: list[str]
    """Those of the checked tasks, by which verifiers are chosen, in alphabetical order, at most MAX_NAMES."""


def check_source(
    source: dict[str, Any], roots: list[str], bounds: dict[str, int], field: str, until: float
) -> SourceFacts:
    """Opens a source of tasks and makes some of its tasks.

    Args:
        source: `data.train` or `data.eval` of the spec as JSON values.
        roots: the directories that files may lie in (`data_roots`).
        bounds: fields of DataBounds.
        field: of the job spec, for the errors.
        until: when to stop, monotonic seconds; the first task of a procedural source is always made, and the first MIN_READ_BYTES of a
            file are always read.

    Raises:
        DataError: `data.train.source: <file>: row N: what is wrong`, or `data.train.config: …`.
    """
    spec = DataSourceSpec.model_validate(source)
    folders = [Path(root) for root in roots]
    tasks = open_within(spec, folders, DataBounds(**bounds), field=field, until=until, whole=False)
    if isinstance(tasks, ProceduralSource | EnvironmentSource):
        names: list[str] = []
        for index in dict.fromkeys(len(tasks) * number // TRIED_TASKS for number in range(TRIED_TASKS)):
            names.append(tasks[index].data_source)
            if time.monotonic() > until:
                break
        checked, all_checked = len(names), False
    else:
        names, checked = list(tasks.data_sources), tasks.checked
        all_checked = checked == len(tasks) and tasks.is_complete
    return SourceFacts(
        fingerprint=tasks.fingerprint,
        tasks=len(tasks),
        checked=checked,
        all_checked=all_checked,
        data_sources=sorted(set(names))[:MAX_NAMES],
    )
