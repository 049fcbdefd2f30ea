"""HTTP application of the gateway: its layers and routes, wired.

    request ─► Observer ─► OpenAIForm ─► HostCheck ─► RequestTimeout ─► BearerAuth ─► RequestLimit ─► BodyLimit ─► routes ─► JobStore, Redis
               count, log   /v1 only     421, 400     504               401           429             413, 408     4xx, 503 by errors.py

The order matters: a request without the token, or beyond the limit of requests in flight, reads no record and no body.
"""

from __future__ import annotations

from fastapi import FastAPI
from redis.asyncio import Redis

from services.common.config.settings import Settings, is_loopback
from services.common.hubs.fetcher import Fetcher
from services.common.jobs.restore import Restorer
from services.common.jobs.retention import Retention
from services.common.jobs.store import JobStore
from services.common.service.metrics import release
from services.gateway.admission.admission import Admission
from services.gateway.dependencies import Context, EventTimes
from services.gateway.errors import HANDLERS
from services.gateway.events.hub import EventHub
from services.gateway.fetches import JobFetches
from services.gateway.metrics import GatewayMetrics, Observer
from services.gateway.middleware.auth import ALWAYS_OPEN, BearerAuth, HostCheck, open_paths, published_names
from services.gateway.middleware.limits import BodyLimit, RequestLimit, RequestTimeout
from services.gateway.middleware.streams import StreamLimit
from services.gateway.openai.client import InferenceClient
from services.gateway.openai.errors import OPENAI_HANDLERS, OpenAIForm
from services.gateway.routes import (
    catalog,
    compare,
    console,
    dead_letters,
    jobs,
    ledger,
    openai,
    reads,
    retention,
    service,
    workers,
)

ROUTES = (catalog, compare, jobs, retention, reads, workers, ledger, dead_letters, openai, service, console)


def create_app(
    settings: Settings, redis: Redis, token: str, *, admission: Admission, event_times: EventTimes | None = None
) -> FastAPI:
    """The application. The caller closes the Redis client, whose replies are bytes; every request bears `token`."""
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
        docs_url=None,  # FastAPI's page loads its scripts from another host: `routes.console` has its own page
        redoc_url=None,
        redirect_slashes=False,
        separate_input_output_schemas=False,
        exception_handlers={**HANDLERS, **OPENAI_HANDLERS},
    )
    app.state.context = Context(
        redis=redis,
        store=store,
        restorer=Restorer(redis, jobs_dir, "gateway", lambda _: True),
        retention=Retention(redis, store, settings),
        admission=admission,
        fetches=JobFetches(store, admission, Fetcher.of(settings)),
        metrics=metrics,
        event_times=times,
        hub=EventHub(redis, times.poll_s),
        streams=streams,
        inference=InferenceClient(redis, JobStore(redis), settings.internal_secret),
        settings=settings,
    )
    for module in ROUTES:  # as they are: `include_router` would build each route once more for every application
        app.router.routes += module.router.routes
    unguarded, limit = open_paths(settings) | console.PATHS, settings.max_requests
    app.add_middleware(BodyLimit)
    app.add_middleware(RequestLimit, limit=limit, chats=openai.LIMITS_S, open_paths=unguarded, exempt=ALWAYS_OPEN)
    app.add_middleware(BearerAuth, token=token, open_paths=unguarded)
    app.add_middleware(RequestTimeout, longer_s=openai.LIMITS_S)
    app.add_middleware(
        HostCheck, names=published_names(settings), any_address=not is_loopback(settings.bind_host), exempt=ALWAYS_OPEN
    )
    app.add_middleware(OpenAIForm)
    app.add_middleware(Observer, metrics=metrics)
    return app
