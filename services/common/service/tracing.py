"""Tracing: the way of each training group as OpenTelemetry spans, where a collector is configured (OTEL_EXPORTER_OTLP_ENDPOINT).

    group          issued ─────────────────────────────────────────► its fate           learner
      ├─ sample              first ──► last token                                       rollout server
      ├─ judge                               verdicts                                   reward service
      └─ train                                          the step that trains it         learner

Trace and span ids are digests of job, group and span, so the services share no context and no wire carries one. Spans are made when
their times are known, wait in a bounded queue, and are sent by a thread: a collector that hangs costs spans, never a group's time.
"""

from __future__ import annotations

import hashlib
import logging
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from services.common.config.settings import OtlpProtocol, Settings
from services.common.errors import ConfigError
from services.common.service.host import installed_version

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

log = logging.getLogger(__name__)

GROUP = "group"
"""Name of the span that the others of a group are below."""
QUEUE_SPANS = 4096
"""Spans that wait; the oldest go when there are more."""
BATCH_SPANS = 512
EXPORT_TIMEOUT_S = 10.0
QUIET_S = 60.0
CLOSE_TIMEOUT_S = 2.0
"""Longest time that the end of a process waits for the last spans."""


Attributes = Mapping[str, str | int | float | bool]


@dataclass(frozen=True, slots=True)
class GroupSpan:
    """One part of a group's way. Example: GroupSpan("judge", "demo-3f2a", 17, 1795348800.0, 1795348800.4, {"attempt": 1})."""

    name: str
    job_id: str
    group_id: int
    start: float
    """Unix seconds, as `end`."""
    end: float
    attributes: Attributes = field(default_factory=dict)
    error: str = ""
    """Why it failed; empty when it did not."""


class Tracing:
    """Spans of one process."""

    def __init__(self, settings: Settings, service: str) -> None:
        """Starts the thread that sends. Raises ConfigError when the exporter is not installed."""
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import TraceIdRatioBased

            exporter = _exporter(settings)
        except ImportError as error:
            message = "OTEL_EXPORTER_OTLP_ENDPOINT: the exporter is not installed: pip install 'millrace[traces]'"
            raise ConfigError(message) from error
        own = logging.getLogger("opentelemetry")
        own.handlers, own.propagate = [_seldom], False
        self._resource = Resource.create({
            "service.name": f"millrace-{service}",
            "service.version": installed_version("millrace") or "unknown",
            "service.instance.id": settings.worker_name(service),
            "host.name": socket.gethostname(),
        })  # fmt: skip
        self._bound = TraceIdRatioBased.get_bound_for_rate(settings.trace_ratio)
        self._limit = TraceIdRatioBased.TRACE_ID_LIMIT
        self._processor: BatchSpanProcessor = BatchSpanProcessor(
            exporter, max_queue_size=QUEUE_SPANS, max_export_batch_size=BATCH_SPANS
        )

    def add(self, span: GroupSpan) -> None:
        """Queues a span, if its group is among those that are traced; never waits."""
        trace_id = trace_id_of(span.job_id, span.group_id)
        if trace_id & self._limit >= self._bound:
            return
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

        def context(key: str) -> SpanContext:
            return SpanContext(trace_id, _digest(8, f"{trace_id} {key}"), is_remote=False, trace_flags=TraceFlags(1))

        key = GROUP if span.name == GROUP else f"{span.name} {span.attributes}"
        attributes = {"job_id": span.job_id, "group_id": span.group_id, **span.attributes}
        self._processor.on_end(
            ReadableSpan(
                span.name,
                context=context(key),
                parent=None if span.name == GROUP else context(GROUP),
                resource=self._resource,
                attributes={f"millrace.{name}": value for name, value in attributes.items()},
                status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET),
                start_time=int(span.start * 1e9),
                end_time=int(max(span.start, span.end) * 1e9),
                instrumentation_scope=InstrumentationScope("millrace"),
            )
        )

    def close(self) -> None:
        """Sends what waits, for CLOSE_TIMEOUT_S at most."""
        closing = threading.Thread(target=self._processor.shutdown, name="close tracing", daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)


_tracing: Tracing | None = None


def configure_tracing(settings: Settings, service: str) -> None:
    """Makes this process trace where a collector is configured. Raises ConfigError when the exporter is not installed."""
    global _tracing  # noqa: PLW0603  one for the process, as its logging
    close_tracing()
    _tracing = None if settings.otlp_endpoint is None else Tracing(settings, service)


def close_tracing() -> None:
    """Sends what waits, and traces no more."""
    global _tracing
    tracing, _tracing = _tracing, None
    if tracing is not None:
        tracing.close()


def is_tracing() -> bool:
    """Whether spans are made here."""
    return _tracing is not None


def trace(span: GroupSpan) -> None:
    """Adds a span where this process traces."""
    if _tracing is not None:
        _tracing.add(span)


def trace_id_of(job_id: str, group_id: int) -> int:
    """The trace of a group, 128 bits: the same in every service."""
    return _digest(16, f"{job_id} {group_id}")


def _digest(size: int, text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=size).digest(), "big") or 1


def _exporter(settings: Settings) -> SpanExporter:
    """The exporter of the protocol; it reads headers and certificates from OpenTelemetry's own variables."""
    endpoint = settings.otlp_endpoint or ""
    if settings.otlp_protocol is OtlpProtocol.GRPC:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(endpoint, insecure=endpoint.startswith("http://"), timeout=EXPORT_TIMEOUT_S)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return HttpExporter(f"{endpoint.rstrip('/')}/v1/traces", timeout=EXPORT_TIMEOUT_S)


class _Seldom(logging.Handler):
    """Passes a record of OpenTelemetry's own loggers on once a minute: a collector that is away must not fill the log."""

    def __init__(self) -> None:
        super().__init__()
        self._next = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        """Gives the record to this process's log, or drops it."""
        if record.created >= self._next:
            self._next = record.created + QUIET_S
            logging.getLogger().handle(record)


_seldom = _Seldom()
"""One for the process: the thread of a collector that hangs outlives its Tracing."""
