"""Server of one job's weights: announces versions to rollout servers, sends them or says where they are, and receives reports.

The learner's runs in a process of its own; a rollout server's gives the versions on that it has fetched itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, Self

import grpc

from services.common.config.settings import address, is_loopback
from services.common.errors import ConfigError, DeadlineExceeded
from services.common.pb import weight_sync_pb2 as pb
from services.common.pb import weight_sync_pb2_grpc as pb_grpc
from services.common.service.grpc_server import REFUSED, bind, carries_token
from services.common.service.host import boot_id
from services.common.weight_sync.egress import Egress
from services.common.weight_sync.store import News, Payload, WeightStore
from services.common.weight_sync.turns import Turns
from services.common.weights.channel import FETCH_LIMIT_S, SERVER_OPTIONS, WATCH_LIMIT_S
from services.common.weights.snapshot import PolicyVersion, Snapshot

_MAX_CALLS = 2048
_MAX_WATCHERS = 1024  # every Watch call holds a thread: half of them stay free for Fetch and Report
_POLL_INTERVAL_S = 1.0
"""Between a Watch call's checks that its client is still connected; a call that ends wakes no other."""
KEEP = 3
"""Versions that are kept: the current one, and possible bases of its deltas."""


class WeightService(pb_grpc.WeightSyncServicer):
    """The three calls of the contract, for one job."""

    def __init__(self, job_id: str, store: WeightStore, on_report: Callable[[pb.ReportRequest], None]) -> None:
        self._job_id, self._store, self._on_report = job_id, store, on_report
        self.egress = Egress()
        """Who fetches where."""
        self.turns = Turns(store)
        """Turns on shared devices."""
        self._watchers = threading.BoundedSemaphore(_MAX_WATCHERS)

    def Watch(self, request: pb.WatchRequest, context: grpc.ServicerContext) -> Iterator[pb.Announcement]:  # noqa: N802
        """Announces the current version at once, then newer ones; ends when the server stops, or after WATCH_LIMIT_S."""
        self._check_job(request.job_id, context)
        if not self._watchers.acquire(blocking=False):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{_MAX_WATCHERS} servers watch already")
        try:
            with self.turns.watching(request.server):
                yield from self._announcements(context, limit_s=min(_remaining(context), WATCH_LIMIT_S))
        finally:
            self._watchers.release()

    def Fetch(self, request: pb.FetchRequest, context: grpc.ServicerContext) -> Iterator[pb.FetchReply]:  # noqa: N802
        """Sends the manifest, then the payload from the requested offset, or the path or the address where the version is."""
        self._check_job(request.job_id, context)
        if _remaining(context) > FETCH_LIMIT_S:
            message = f"Fetch needs a deadline of at most {FETCH_LIMIT_S:.0f} s"
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, message)
        snapshot = self._snapshot(request, context)
        if snapshot.path is not None and request.boot_id and request.boot_id == boot_id():
            yield pb.FetchReply(manifest=self._manifest(request, context))
            yield pb.FetchReply(file=pb.LocalFile(path=str(snapshot.path)))
            return
        if relay := self._relay(request, context):
            yield pb.FetchReply(manifest=self._manifest(request, context))
            yield pb.FetchReply(relay=pb.Relay(address=relay))
            return
        base = PolicyVersion.of(request.base) if request.HasField("base") else None
        payload = self._payload(request, base, context)
        if request.offset > payload.wire_bytes:
            message = f"offset {request.offset} lies beyond the {payload.wire_bytes} bytes of this encoding"
            context.abort(grpc.StatusCode.OUT_OF_RANGE, message)
        yield from payload.replies(request.offset)

    def Report(self, request: pb.ReportRequest, context: grpc.ServicerContext) -> pb.ReportReply:  # noqa: N802
        """Takes a report, and replies with the newest version."""
        self._check_job(request.job_id, context)
        version = PolicyVersion.of(request.version)
        if request.yielded:
            self.turns.yielded(request.server)
            return self._reply()
        self.egress.reported(request.server, request.relay, version, failed=bool(request.error))
        self._on_report(request)
        return self._reply()

    def _reply(self) -> pb.ReportReply:
        current = self._store.current
        return pb.ReportReply(current=current.version.message() if current else None)

    def _announcements(self, context: grpc.ServicerContext, limit_s: float) -> Iterator[pb.Announcement]:
        seen: News | None = None
        end = time.monotonic() + limit_s
        while time.monotonic() < end and context.is_active() and not self._store.closed:
            news = self._store.news_after(seen, _POLL_INTERVAL_S)
            snapshot = None if news is None else self._store.get(news.version)
            if news is None or snapshot is None:
                continue
            seen = news
            yield pb.Announcement(
                job_id=self._job_id,
                version=news.version.message(),
                total_bytes=snapshot.total_bytes,
                learner_computes=bool(news.turn),
            )

    def _snapshot(self, request: pb.FetchRequest, context: grpc.ServicerContext) -> Snapshot:
        version = PolicyVersion.of(request.version)
        snapshot = self._store.get(version)
        if snapshot is None:
            context.abort(grpc.StatusCode.NOT_FOUND, f"version {version} of job {self._job_id} is not kept")
        return snapshot

    def _relay(self, request: pb.FetchRequest, context: grpc.ServicerContext) -> str:
        version, timeout_s = PolicyVersion.of(request.version), _remaining(context)
        try:
            return self.egress.place(request.server, version, relays=request.relays, timeout_s=timeout_s)
        except TimeoutError as error:
            context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, str(error))

    def _manifest(self, request: pb.FetchRequest, context: grpc.ServicerContext) -> pb.Manifest:
        """Of the whole version: made once, for all servers."""
        return self._payload(request, None, context).manifest

    def _payload(self, request: pb.FetchRequest, base: PolicyVersion | None, context: grpc.ServicerContext) -> Payload:
        version = PolicyVersion.of(request.version)
        try:
            return self._store.payload(version, base, _remaining(context))
        except KeyError:  # a newer version came while it waited for a place
            context.abort(grpc.StatusCode.NOT_FOUND, f"version {version} of job {self._job_id} is not kept any more")
        except DeadlineExceeded as error:
            context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, str(error))

    def _check_job(self, job_id: str, context: grpc.ServicerContext) -> None:
        if job_id != self._job_id:
            message = f"job {job_id!r} is not here: this learner serves {self._job_id!r}"
            context.abort(grpc.StatusCode.NOT_FOUND, message)


class TokenInterceptor(grpc.ServerInterceptor):
    """Refuses every call without the token, whatever its method."""

    def __init__(self, token: str) -> None:
        self._token = token

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Passes the call on, or replaces it by a refusal, which ends a call of either kind before its first reply."""
        if carries_token(handler_call_details, self._token):
            return continuation(handler_call_details)
        return grpc.unary_unary_rpc_method_handler(_refuse)


def start_server(service: WeightService, host: str, port: int, token: str | None) -> tuple[grpc.Server, int]:
    """Starts serving; port 0 takes a free one. Returns the server and its port. Raises as `bind`."""
    server = grpc.server(
        ThreadPoolExecutor(_MAX_CALLS, thread_name_prefix="weights"),
        interceptors=[TokenInterceptor(token)] if token else [],
        options=SERVER_OPTIONS,
        maximum_concurrent_rpcs=_MAX_CALLS,
    )
    pb_grpc.add_WeightSyncServicer_to_server(service, server)  # type: ignore[no-untyped-call]  # generated code
    bound = bind(server, host, port, "weights")
    server.start()
    return server, bound


def _remaining(context: grpc.ServicerContext) -> float:
    remaining = context.time_remaining()
    return float("inf") if remaining is None else remaining


def _refuse(_request: object, context: grpc.ServicerContext) -> NoReturn:
    context.abort(grpc.StatusCode.UNAUTHENTICATED, REFUSED)


class WeightServer:
    """Serves one job's policy versions to any number of rollout servers, from construction to `stop`."""

    def __init__(
        self, job_id: str, host: str, port: int, token: str | None, keep: int = KEEP, *,
        advertise_host: str | None = None, on_report: Callable[[pb.ReportRequest], None] | None = None,
    ) -> None:  # fmt: skip
        """Starts serving on `host` (port 0 takes a free one). `on_report` is called in the server's threads.

        Raises:
            ConfigError: the address cannot be served, or is not loopback and there is no token.
        """
        if token is None and not is_loopback(host):
            raise ConfigError(f"host={host} is not loopback: the weights' server needs a token")
        self._store = WeightStore(keep)
        self.service = WeightService(job_id, self._store, on_report or (lambda _report: None))
        """The three calls."""
        self._server, self.port = start_server(self.service, host, port, token)
        self.address = address(advertise_host or host, self.port)

    def publish(self, snapshot: Snapshot) -> None:
        """Makes the snapshot the current version and announces it, within microseconds. Raises as `WeightStore.put`."""
        self._store.put(snapshot)

    def begin_turn(self, limit_s: float) -> list[str]:
        """Begins the learner's turn on shared devices; returns once every server that watches samples nothing.

        After `limit_s` seconds it returns all the same, with the names of those that have not said so.
        """
        return self.service.turns.begin(limit_s)

    @property
    def current(self) -> Snapshot | None:
        """The version published last."""
        return self._store.current

    def stop(self, timeout_s: float = 5.0) -> None:
        """Ends `Watch` calls at once, and transfers after at most `timeout_s` seconds."""
        self._store.close()
        self._server.stop(timeout_s).wait(timeout_s + 1.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
