"""Trial of a job's data: opens it as the learner does, in a child process that can be killed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, TypedDict

from services.common.data.bounds import DataBounds
from services.common.data.procedural import ProceduralSource
from services.common.data.source import open_within
from services.common.spec.data import DataSourceSpec

TRIED_TASKS = 16
"""Of a procedural source, spread over its tasks."""
MAX_NAMES = 1000


class SourceFacts(TypedDict):
    """Results of the trial, as MessagePack values."""

    fingerprint: str
    """Of content and settings, as checkpoints record it."""
    tasks: int
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
        until: when to stop checking, monotonic seconds; a file is always read to its end, and the first task is always made.

    Raises:
        DataError: `data.train.source: <file>: row N: what is wrong`, or `data.train.config: …`.
    """
    spec = DataSourceSpec.model_validate(source)
    tasks = open_within(spec, [Path(root) for root in roots], DataBounds(**bounds), field=field, until=until)
    if isinstance(tasks, ProceduralSource):
        names: list[str] = []
        for index in dict.fromkeys(len(tasks) * number // TRIED_TASKS for number in range(TRIED_TASKS)):
            names.append(tasks[index].data_source)
            if time.monotonic() > until:
                break
        checked, all_checked = len(names), False
    else:
        names, checked, all_checked = list(tasks.data_sources), tasks.checked, tasks.checked == len(tasks)
    return SourceFacts(
        fingerprint=tasks.fingerprint,
        tasks=len(tasks),
        checked=checked,
        all_checked=all_checked,
        data_sources=sorted(set(names))[:MAX_NAMES],
    )
