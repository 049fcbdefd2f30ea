"""The workers as people read them: those whose heartbeat is fresh, and those that the stack could not keep alive."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from services.common.service.heartbeat import WorkerKind, WorkerStatus
from services.common.service.lost_processes import LostProcess

LOST = "lost"
"""The state of a worker that the supervisor gave up for now."""


def roster(alive: Iterable[WorkerStatus], lost: Iterable[LostProcess]) -> list[WorkerStatus]:
    """By name; a lost one says why in its detail, also while it is tried again and its heart beats."""
    found = {status.name: status for status in alive}
    for process in lost:
        kind = process.name.partition("-")[0]
        if kind in set(WorkerKind):  # not redis or the gateway, which are no workers
            gone = WorkerStatus(process.name, WorkerKind(kind), LOST, pid=0, at=process.at)
            status = found.get(process.name, gone)
            found[process.name] = replace(status, detail={**status.detail, "trouble": process.cause})
    return [found[name] for name in sorted(found)]
