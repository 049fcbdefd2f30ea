"""Health, readiness and metrics of the gateway."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from redis.exceptions import RedisError

from services.common.redis.pool import PoolBusyError, WaitingPool
from services.gateway.dependencies import ContextDep
from services.gateway.errors import busy, documented, error_answer
from services.gateway.schemas import ErrorAnswer, Health

router = APIRouter(tags=["service"])

READY_TIMEOUT_S = 2.0


@router.get("/healthz", operation_id="health", summary="Health")
async def healthz() -> Health:
    """The process answers."""
    return Health(status="ok")


@router.get(
    "/readyz",
    operation_id="readiness",
    summary="Readiness",
    response_model=Health,
    responses={503: {"model": ErrorAnswer, "description": "Redis does not answer."}},
)
async def readyz(context: ContextDep) -> Health | Response:
    """Redis answers, so jobs can be taken in."""
    try:
        async with asyncio.timeout(READY_TIMEOUT_S):
            await context.redis.ping()
    except PoolBusyError:
        return busy()
    except TimeoutError:
        pool = context.redis.connection_pool
        if isinstance(pool, WaitingPool) and pool.exhausted:
            return busy()
    except RedisError:
        pass
    else:
        return Health(status="ok")
    return error_answer(503, "Redis does not answer")


@router.get(
    "/metrics",
    operation_id="prometheus",
    summary="Prometheus metrics",
    response_class=Response,
    responses={
        200: {"description": "Prometheus' text format.", "content": {"text/plain": {"schema": {"type": "string"}}}},
        **documented(),
    },
)
async def metrics(context: ContextDep) -> Response:
    """Prometheus metrics of the gateway. Beyond loopback this needs the token."""
    await context.metrics.system.refresh(context.redis)
    # In a thread: it reads the statistics of every child process.
    document = await asyncio.to_thread(generate_latest, context.metrics.registry)
    return Response(document, headers={"Content-Type": CONTENT_TYPE_LATEST})
