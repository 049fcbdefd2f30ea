"""The gateway's HTTP application, wired.

    request ─► Observer ─► OpenAIForm ─► HostCheck ─► RequestTimeout ─► BearerAuth ─► RequestLimit ─► BodyLimit ─► routes ─► JobStore, Redis
               count, log   /v1 only     421, 400     504               401           429             413, 408     4xx, 503 by errors.py

The order matters: nothing is looked up, and no body is read, for a request without the token or without a place.
"""

from __future__ import annotations

from fastapi import Depends, FastAPI
from fastapi.security import HTTPBearer
from redis.asyncio import Redis

from services.common.jobs import JobStore
from services.common.process_metrics import release
from services.common.restore import Restorer
from services.common.retention import Retention
from services.common.settings import Settings, is_loopback
from services.gateway import (
    console_routes,
    dead_letter_routes,
    jobs_routes,
    ledger_routes,
    openai_routes,
    reads_routes,
    retention_routes,
    service_routes,
)
from services.gateway.admission import Admission
from services.gateway.auth import ALWAYS_OPEN, BearerAuth, open_paths
from services.gateway.body_limit import BodyLimit, RequestTimeout
from services.gateway.context import Context, EventTimes
from services.gateway.errors import install_handlers
from services.gateway.event_hub import EventHub
from services.gateway.host_check import HostCheck, published_names
from services.gateway.inference import InferenceClient
from services.gateway.metrics import GatewayMetrics, Observer
from services.gateway.openai_errors import OpenAIForm, install_openai_handler
from services.gateway.request_limit import RequestLimit
from services.gateway.stream_limit import StreamLimit

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
    streams = StreamLimit(settings.max_event_streams)
    metrics = GatewayMetrics()
    metrics.streams.set_function(lambda: len(streams))
    times = event_times or EventTimes()
    jobs_dir = settings.home / "jobs"
    store = JobStore(redis, jobs_dir)
    app = FastAPI(
        title="Millrace gateway",
        summary="Submit, watch and cancel reinforcement-learning jobs.",
        version=release(),
        docs_url=None,  # FastAPI's page loads its scripts from another host: `console_routes` has one of its own
        redoc_url=None,
        redirect_slashes=False,
        separate_input_output_schemas=False,
    )
    app.state.context = Context(
        redis=redis,
        store=store,
        restorer=Restorer(redis, jobs_dir, "gateway", lambda _: True),
        retention=Retention(redis, store, settings),
        admission=admission,
        metrics=metrics,
        event_times=times,
        hub=EventHub(redis, times.poll_s),
        streams=streams,
        inference=InferenceClient(
            redis, JobStore(redis), settings.internal_token.get_secret_value() if settings.internal_token else None
        ),
        settings=settings,
    )
    routers = (
        jobs_routes.router, retention_routes.router,
        reads_routes.router, ledger_routes.router, dead_letter_routes.router, openai_routes.router,
    )  # fmt: skip
    for router in routers:
        app.include_router(router, dependencies=[Depends(_BEARER)])
    app.include_router(service_routes.router)
    app.include_router(console_routes.router)
    install_handlers(app)
    install_openai_handler(app)
    unguarded = open_paths(settings) | console_routes.PATHS
    limit = settings.max_requests
    app.add_middleware(BodyLimit)
    app.add_middleware(
        RequestLimit, limit=limit, chats=openai_routes.LIMITS_S, open_paths=unguarded, exempt=ALWAYS_OPEN
    )
    app.add_middleware(BearerAuth, token=token, open_paths=unguarded)
    app.add_middleware(RequestTimeout, longer_s=openai_routes.LIMITS_S)
    app.add_middleware(
        HostCheck,
        names=published_names(settings),
        any_address=not is_loopback(settings.bind_host),
        exempt=ALWAYS_OPEN,
    )
    app.add_middleware(OpenAIForm)
    app.add_middleware(Observer, metrics=metrics)
    return app
