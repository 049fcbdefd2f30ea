"""Workers: the processes with a fresh heartbeat, and those that the supervisor could not keep alive."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace

from fastapi import APIRouter

from services.common.service.heartbeat import WorkerKind, WorkerStatus, live_workers
from services.common.service.lost_processes import LostProcess, lost_processes
from services.gateway.dependencies import GUARDS, ContextDep
from services.gateway.errors import documented
from services.gateway.schemas import Worker, WorkerList

router = APIRouter(tags=["workers"], dependencies=GUARDS)

LOST = "lost"
"""State of a worker that the supervisor gave up for now."""


@router.get("/workers", operation_id="list_workers", summary="Workers", responses=documented(422))
async def list_workers(context: ContextDep) -> WorkerList:
    """Every worker (rollout, reward, environment, learner) with a fresh heartbeat, and those that cannot be kept alive, with the cause."""
    lost = await asyncio.to_thread(lost_processes, context.settings.home)
    found = worker_list(await live_workers(context.redis), lost)
    return WorkerList(workers=[Worker.model_validate(status) for status in found])


def worker_list(alive: Iterable[WorkerStatus], lost: Iterable[LostProcess]) -> list[WorkerStatus]:
    """Workers by name; a lost one has the cause in its detail, also while it is restarted and sends heartbeats."""
    found = {status.name: status for status in alive}
    for process in lost:
        kind = process.name.partition("-")[0]
        if kind in set(WorkerKind):  # Redis and the gateway are no workers
            gone = WorkerStatus(process.name, WorkerKind(kind), LOST, pid=0, at=process.at)
            status = found.get(process.name, gone)
            found[process.name] = replace(status, detail={**status.detail, "trouble": process.cause})
    return [found[name] for name in sorted(found)]
