"""Trial of a job's data: opened as the learner will open it, where it can be killed."""

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
    """What the trial has found, as MessagePack values."""

    fingerprint: str
    """Of content and settings, as checkpoints record it."""
    tasks: int
    checked: int
    """Rows of a file that were checked; of a procedural source the tasks that were made."""
    all_checked: bool
    """Whether every row of a file was; never of a procedural source."""
    data_sources: list[str]
    """By which verifiers are chosen, of what was checked, in alphabetical order, MAX_NAMES at the most."""


def try_source(
    source: dict[str, Any], roots: list[str], bounds: dict[str, int], field: str, until: float
) -> SourceFacts:
    """Opens a source of tasks and makes tasks of it.

    Args:
        source: the spec's `data.train` or `data.eval` as JSON values.
        roots: the directories that files may lie in (`data_roots`).
        bounds: fields of DataBounds.
        field: where the source stands in the spec.
        until: when to stop checking more of it, monotonic seconds; the file is read to its end, and the first task is made.

    Raises:
        DataError: `data.train.source: <file>: row N: what is wrong`, or `data.train.config: …`.
    """
    spec = DataSourceSpec.model_validate(source)
    tasks = open_within(spec, [Path(root) for root in roots], DataBounds(**bounds), field=field, until=until)
    if isinstance(tasks, ProceduralSource):
        made = 0
        for index in dict.fromkeys(len(tasks) * number // TRIED_TASKS for number in range(TRIED_TASKS)):
            name = tasks[index].data_source
            made += 1
            if time.monotonic() > until:
                break
        return SourceFacts(
            fingerprint=tasks.fingerprint, tasks=len(tasks), checked=made, all_checked=False, data_sources=[name]
        )
    names = sorted(tasks.data_sources)[:MAX_NAMES]
    return SourceFacts(
        fingerprint=tasks.fingerprint,
        tasks=len(tasks),
        checked=tasks.checked,
        all_checked=tasks.checked == len(tasks),
        data_sources=names,
    )
