"""The audit of one batch: each group that a journal record holds, by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from services.common.codec import decode
from services.common.errors import EntryError
from services.common.types import Purpose, RolloutGroup, ScoredGroup
from services.learner.audit_report import Breach
from services.learner.journal import BatchRecord

Note = Callable[[Breach, str, str], None]
"""Notes a violation: kind, where, message."""


@dataclass(slots=True)
class Batch:
    """What a record was found to train."""

    lineage: int
    groups: int
    policy_age_max: int = 0
    ids: Counter[int] = field(default_factory=Counter)
    """How often each group stands in it."""


def check_batch(where: str, record: BatchRecord, *, job_id: str, max_off_policy_steps: int, note: Note) -> Batch:
    """Reads every group of the record and checks job, lineage, versions and age."""
    batch = Batch(record.lineage, len(record.groups))
    for position, payload in enumerate(record.groups):
        try:
            group = decode(ScoredGroup, payload).group
        except EntryError as error:
            note(Breach.DAMAGED, where, f"the batch's group at place {position}: {error}")
            continue
        batch.ids[group.task.group_id] += 1
        place = f"{where}, group {group.task.group_id}"
        for breach, message in _faults(group, record, job_id, max_off_policy_steps):
            note(breach, place, message)
        batch.policy_age_max = max(batch.policy_age_max, record.step - 1 - group.min_policy_version)
    return batch


def _faults(group: RolloutGroup, record: BatchRecord, job_id: str, bound: int) -> list[tuple[Breach, str]]:
    task, version = group.task, record.step - 1
    oldest, newest, age = group.min_policy_version, group.max_policy_version, version - group.min_policy_version
    faults = [
        (
            task.job_id != job_id or task.purpose is not Purpose.TRAIN or group.failure is not None,
            Breach.FOREIGN,
            f"a group of job {task.job_id}, for {task.purpose}, {group.failure or 'sampled'}",
        ),
        (
            task.lineage > record.lineage,
            Breach.LINEAGE,
            f"issued in lineage {task.lineage}, trained in lineage {record.lineage}",
        ),
        (newest > version, Breach.VERSION, f"sampled by version {newest}, when version {version} was the newest"),
        (
            oldest < task.min_policy_version,
            Breach.VERSION,
            f"sampled by version {oldest}, older than version {task.min_policy_version} that was asked for",
        ),
        (age > bound, Breach.TOO_OLD, f"policy_age {age} exceeds max_off_policy_steps {bound}"),
    ]
    return [(breach, message) for wrong, breach, message in faults if wrong]
