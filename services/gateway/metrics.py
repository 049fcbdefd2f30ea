"""Prometheus metrics of the gateway, and the log line of each request. No label has more values than there are routes."""

from __future__ import annotations

import logging
import re
import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, PlatformCollector, ProcessCollector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.service.logs import log_context
from services.common.service.metrics import ProcessMetrics
from services.gateway.schemas import JOB_ID_PATTERN
from services.gateway.system_metrics import SystemMetrics

log = logging.getLogger("millrace.gateway.access")

METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE"})
JOB_ID = re.compile(JOB_ID_PATTERN)
TRACKERS = ("files", "tensorboard", "mlflow", "wandb", "swanlab")
QUIET = frozenset({"/healthz", "/readyz", "/metrics"})
"""Paths that monitors poll every few seconds: logged at DEBUG, as reads that succeed are."""


class GatewayMetrics:
    """All metrics of one gateway, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        ProcessMetrics(self.registry)
        self.requests = Counter(
            "millrace_gateway_requests_total",
            "HTTP requests answered.",
            ["method", "route", "status"],
            registry=self.registry,
        )
        self.seconds = Histogram(
            "millrace_gateway_request_seconds",
            "Time from a request to the end of its answer; event streams and chats are left out.",
            ["route"],
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
            registry=self.registry,
        )
        self.submitted = Counter("millrace_gateway_jobs_submitted_total", "Jobs taken in.", registry=self.registry)
        self.refused = Counter("millrace_gateway_jobs_refused_total", "Job specs refused.", registry=self.registry)
        self.streams = Gauge("millrace_gateway_event_streams", "Event streams open now.", registry=self.registry)
        self.tracker_points = Counter(
            "millrace_gateway_tracker_points_total",
            "Steps and evaluations that a tracker has accepted.",
            ["tracker"],
            registry=self.registry,
        )
        self.tracker_failures = Counter(
            "millrace_gateway_tracker_failures_total",
            "Batches that a tracker did not accept in time, or refused; they are sent again.",
            ["tracker"],
            registry=self.registry,
        )
        for name in TRACKERS:
            self.tracker_points.labels(name)
            self.tracker_failures.labels(name)
        self.system = SystemMetrics(self.registry)


class Observer:
    """The outermost layer: counts, times and logs every request by its route, never by the path that the client sent."""

    def __init__(self, app: ASGIApp, *, metrics: GatewayMetrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        status = 500  # the server's answer when the app raises before its own

        async def observe(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, observe)
        finally:
            self._record(scope, status, time.perf_counter() - started)

    def _record(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", None) or "unmatched"
        method = scope["method"] if scope["method"] in METHODS else "other"
        self._metrics.requests.labels(method=method, route=route, status=status).inc()
        if not route.endswith(("/events", "/completions")):
            self._metrics.seconds.labels(route=route).observe(seconds)
        reads = method in {"GET", "HEAD"} and status < 400
        level = logging.DEBUG if route in QUIET or reads else logging.INFO
        job_id = str(scope.get("path_params", {}).get("job_id", ""))
        with log_context(**({"job_id": job_id} if JOB_ID.fullmatch(job_id) else {})):
            log.log(level, "%s %s -> %d in %.1f ms", method, route, status, seconds * 1000)
