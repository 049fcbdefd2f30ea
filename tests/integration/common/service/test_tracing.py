"""Traces against local collectors, which decode them with OpenTelemetry's own messages."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from services.common.config.settings import Settings
from services.common.jobs.fates import Fate
from services.common.service import tracing
from services.common.service.tracing import GroupSpan, close_tracing, configure_tracing, trace, trace_id_of
from services.learner.groups.buffer import Judged
from services.learner.groups.ledger import Settled
from services.learner.loops.traces import GroupTraces
from tests.http_server import serving
from tests.unit.learner.scored_groups import scored_group


class Collector:
    """Spans that came, by service."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []
        self.hang = threading.Event()

    def take(self, request: Any) -> None:
        while self.hang.is_set():
            time.sleep(0.05)
        for part in request.resource_spans:
            service = {item.key: item.value.string_value for item in part.resource.attributes}["service.name"]
            self.spans += [(service, span) for scope in part.scope_spans for span in scope.spans]


@contextmanager
def over_http(collector: Collector) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["content-length"]))
            data = gzip.decompress(data) if self.headers.get("content-encoding") == "gzip" else data
            assert self.path == "/v1/traces"
            collector.take(ExportTraceServiceRequest.FromString(data))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(ExportTraceServiceResponse().SerializeToString())

    with serving(Handler, collector.hang.clear) as url:
        yield url


@contextmanager
def over_grpc(collector: Collector) -> Iterator[str]:
    def export(request: Any, _: grpc.ServicerContext) -> Any:
        collector.take(request)
        return ExportTraceServiceResponse()

    method = grpc.unary_unary_rpc_method_handler(
        export, ExportTraceServiceRequest.FromString, ExportTraceServiceResponse.SerializeToString
    )
    name = "opentelemetry.proto.collector.trace.v1.TraceService"
    server = grpc.server(futures.ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(name, {"Export": method})])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        collector.hang.clear()
        server.stop(0).wait()


SERVERS = {"http/protobuf": over_http, "grpc": over_grpc}


@contextmanager
def tracing_to(
    endpoint: str, service: str = "learner", protocol: str = "http/protobuf", ratio: float = 1.0
) -> Iterator[None]:
    names = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
        "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
        "OTEL_TRACES_SAMPLER_ARG": ratio,
    }
    configure_tracing(Settings.model_validate(names), service)
    try:
        yield
    finally:
        close_tracing()


def attributes(span: Any) -> dict[str, Any]:
    return {item.key: getattr(item.value, str(item.value.WhichOneof("value"))) for item in span.attributes}


@pytest.mark.parametrize("protocol", sorted(SERVERS))
def test_the_spans_of_a_group_from_three_services_are_one_tree(protocol: str) -> None:
    collector = Collector()
    with SERVERS[protocol](collector) as endpoint:
        with tracing_to(endpoint, "rollout", protocol):
            trace(GroupSpan("sample", "demo-1", 7, 100.0, 101.5, {"attempt": 1}))
        with tracing_to(endpoint, "reward", protocol):
            trace(GroupSpan("judge", "demo-1", 7, 102.0, 102.25, {"attempt": 1}))
        with tracing_to(endpoint, "learner", protocol):
            trace(GroupSpan("group", "demo-1", 7, 99.0, 104.0, {"fate": "trained", "step": 3}))
    spans = {span.name: (service, span) for service, span in collector.spans}
    service, root = spans["group"]
    assert service == "millrace-learner"
    assert int.from_bytes(root.trace_id, "big") == trace_id_of("demo-1", 7)
    assert root.parent_span_id == b""
    assert attributes(root) == {
        "millrace.job_id": "demo-1", "millrace.group_id": 7, "millrace.fate": "trained", "millrace.step": 3,
    }  # fmt: skip
    for name, owner in (("sample", "millrace-rollout"), ("judge", "millrace-reward")):
        service, span = spans[name]
        assert (service, span.trace_id, span.parent_span_id) == (owner, root.trace_id, root.span_id)
    assert spans["sample"][1].end_time_unix_nano - spans["sample"][1].start_time_unix_nano == 1_500_000_000


def test_every_fate_of_the_learner_is_a_span() -> None:
    collector = Collector()
    with over_http(collector) as endpoint, tracing_to(endpoint):
        traces = GroupTraces()
        for group_id in range(4):
            traces.issued("demo-1", group_id)
        for group_id in (0, 1):
            scored = scored_group(group_id, [0.0, 1.0])
            traces.arrived(Judged(scored, b"", None))
        fates = [
            Settled(0, Fate.TRAINED),
            Settled(1, Fate.DEGENERATE),
            Settled(2, Fate.FAILED, "no answer"),
            Settled(9, Fate.STALE),
        ]
        traces.settled(fates, 1)
        traces.trained([0], step=5, lineage=1, began=time.time())
        assert list(traces._ways) == [3]  # it has no fate
    found = {(span.name, attributes(span)["millrace.group_id"]): span for _, span in collector.spans}
    assert set(found) == {("group", 0), ("train", 0), ("group", 1), ("group", 2)}
    assert attributes(found["group", 0])["millrace.reward_mean"] == 0.5
    assert attributes(found["train", 0])["millrace.step"] == 5
    assert attributes(found["group", 1])["millrace.fate"] == "degenerate"
    assert (found["group", 2].status.code, found["group", 2].status.message) == (2, "no answer")


def test_every_service_traces_the_same_share_of_the_groups() -> None:
    taken: dict[str, set[int]] = {}
    for service in ("rollout", "learner"):
        collector = Collector()
        with over_http(collector) as endpoint, tracing_to(endpoint, service, ratio=0.25):
            for group_id in range(400):
                trace(GroupSpan("group", "demo-1", group_id, 1.0, 2.0))
        taken[service] = {attributes(span)["millrace.group_id"] for _, span in collector.spans}
    assert taken["rollout"] == taken["learner"]
    assert 60 < len(taken["learner"]) < 140


@pytest.mark.parametrize("protocol", sorted(SERVERS))
def test_a_collector_that_hangs_holds_up_nothing(
    protocol: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracing, "CLOSE_TIMEOUT_S", 0.5)
    collector = Collector()
    collector.hang.set()
    with SERVERS[protocol](collector) as endpoint:
        configure_tracing(
            Settings.model_validate({"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_EXPORTER_OTLP_PROTOCOL": protocol}),
            "learner",
        )
        began = time.monotonic()
        for group_id in range(3 * tracing.QUEUE_SPANS):
            trace(GroupSpan("group", "demo-1", group_id, 1.0, 2.0))
        per_span_s = (time.monotonic() - began) / (3 * tracing.QUEUE_SPANS)
        waiting = tracing._tracing
        assert waiting is not None
        assert len(waiting._processor._batch_processor._queue) <= tracing.QUEUE_SPANS
        began = time.monotonic()
        close_tracing()
        assert time.monotonic() - began < 3.0
    assert per_span_s < 0.001
    assert len(caplog.records) <= 1  # thousands of spans were dropped


def test_without_a_collector_nothing_is_made() -> None:
    configure_tracing(Settings.model_validate({"OTEL_EXPORTER_OTLP_ENDPOINT": None}), "learner")
    traces = GroupTraces()
    traces.issued("demo-1", 1)
    assert traces._ways == {}
    assert not tracing.is_tracing()
