"""The gateway's HTTP application, wired.

    request ─► Observer ─► OpenAIForm ─► RequestTimeout ─► BearerAuth ─► BodyLimit ─► routes ─► JobStore, Redis
               count, log   /v1 only      504               401           413, 408     4xx, 503 by errors.py

The order matters: nothing is looked up, and no body is read, for a request without the token.
"""

from __future__ import annotations

from fastapi import Depends, FastAPI
from fastapi.security import HTTPBearer
from redis.asyncio import Redis

from services.common.jobs import JobStore
from services.common.release import release
from services.common.restore import Restorer
from services.common.settings import Settings
from services.gateway import (
    console_routes,
    dead_letter_routes,
    jobs_routes,
    ledger_routes,
    openai_routes,
    reads_routes,
    service_routes,
)
from services.gateway.admission import Admission
from services.gateway.auth import BearerAuth, open_paths
from services.gateway.body_limit import BodyLimit, RequestTimeout
from services.gateway.context import Context, EventTimes
from services.gateway.errors import install_handlers
from services.gateway.inference import InferenceClient
from services.gateway.metrics import GatewayMetrics, Observer
from services.gateway.openai_errors import OpenAIForm, install_openai_handler

_BEARER = HTTPBearer(auto_error=False, description="The gateway's token; `<home>/gateway.token` holds a generated one.")
"""For the OpenAPI only: BearerAuth has already refused what must be refused."""


def create_app(
    settings: Settings,
    redis: Redis,
    token: str,
    *,
    admission: Admission,
    event_times: EventTimes | None = None,
) -> FastAPI:
    """The application; whoever made the Redis client closes it.

    Args:
        settings: address and directories.
        redis: client whose replies are bytes.
        token: what requests must bear.
        admission: reads and checks new jobs.
        event_times: pace of event streams.
    """
    metrics = GatewayMetrics()
    jobs_dir = settings.home / "jobs"
    app = FastAPI(
        title="Millrace gateway",
        summary="Submit, watch and cancel reinforcement-learning jobs.",
        version=release(),
        redoc_url=None,
        redirect_slashes=False,
        separate_input_output_schemas=False,
    )
    app.state.context = Context(
        redis=redis,
        store=JobStore(redis, jobs_dir),
        restorer=Restorer(redis, jobs_dir, "gateway", lambda _: True),
        admission=admission,
        metrics=metrics,
        event_times=event_times or EventTimes(),
        inference=InferenceClient(
            redis, JobStore(redis), settings.internal_token.get_secret_value() if settings.internal_token else None
        ),
        settings=settings,
    )
    routers = (
        jobs_routes.router, reads_routes.router, ledger_routes.router, dead_letter_routes.router, openai_routes.router,
    )  # fmt: skip
    for router in routers:
        app.include_router(router, dependencies=[Depends(_BEARER)])
    app.include_router(service_routes.router)
    app.include_router(console_routes.router)
    install_handlers(app)
    install_openai_handler(app)
    app.add_middleware(BodyLimit)
    app.add_middleware(BearerAuth, token=token, open_paths=open_paths(settings) | console_routes.PATHS)
    app.add_middleware(RequestTimeout, longer_s=openai_routes.LIMITS_S)
    app.add_middleware(OpenAIForm)
    app.add_middleware(Observer, metrics=metrics)
    return app
