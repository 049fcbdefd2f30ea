"""Client of the rollout servers: picks a server for a chat, and streams its answer.

a running job ──► a server attached to it, with a policy loaded, the least busy first
an ended job  ──► a server that has its export, else an idle one, else one that serves another export
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import grpc
import grpc.aio
from redis.asyncio import Redis

from services.common.config.inference import (
    GENERATE_LIMIT_S,
    LOAD_LIMIT_S,
    PARAM_HEADER,
    REASON_HEADER,
    RefusalReason,
)
from services.common.jobs.record import JobRecord, JobRow, JobState
from services.common.jobs.store import JobStore
from services.common.pb import inference_pb2 as pb
from services.common.pb import inference_pb2_grpc as pb_grpc
from services.common.service.heartbeat import WorkerKind, WorkerStatus, live_workers
from services.common.weights.channel import CLIENT_OPTIONS, token_metadata
from services.gateway.metrics import JOB_ID
from services.gateway.openai.errors import OpenAIError

log = logging.getLogger(__name__)

SERVER_WAIT_S = 5.0
"""Longest wait for a server: heartbeats are two seconds apart."""
POLL_INTERVAL_S = 0.5
CALL_LIMIT_S = LOAD_LIMIT_S + GENERATE_LIMIT_S + 30.0
RETRY_AFTER_S = 5
MAX_MODELS = 500
MAX_CHANNELS = 64
GRACE_S = 600.0
"""Longest time that answers on a closing channel may take to end."""

Replies = AsyncGenerator[pb.GenerateReply, None]
_RETRYABLE = {RefusalReason.NOT_HERE, RefusalReason.BUSY}
_STATUS = {
    RefusalReason.NOT_FOUND: (404, "model_not_found"),
    RefusalReason.NOT_HERE: (503, "model_not_ready"),
    RefusalReason.NOT_LOADED: (503, "model_not_ready"),
    RefusalReason.BUSY: (429, "rate_limit_exceeded"),
    RefusalReason.ABORTED: (503, "aborted"),
    RefusalReason.TOO_SLOW: (504, "timeout"),
    RefusalReason.TOO_LONG: (400, "context_length_exceeded"),
    RefusalReason.INVALID: (400, "invalid_value"),
}


class InferenceClient:
    """Client of all rollout servers."""

    def __init__(self, redis: Redis, store: JobStore, token: str | None) -> None:
        """`token`: the internal one, if set."""
        self._redis, self._store = redis, store
        self._metadata = token_metadata(token)
        self._channels = Channels()
        self._workers: tuple[float, list[WorkerStatus]] = (0.0, [])

    async def close(self) -> None:
        """Closes its connections."""
        await self._channels.close()

    async def models(self) -> list[JobRow]:
        """Jobs that have a policy, newest first."""
        return [row for row in await self._store.list(limit=MAX_MODELS) if _has_policy(row)]

    async def model(self, name: str) -> JobRecord:
        """The job of that id. Raises OpenAIError when there is none, or it has no policy."""
        record = await self._store.find(name) if JOB_ID.fullmatch(name) else None
        if record is None:
            message = f"the model {name!r} does not exist: GET /v1/models lists those that do"
            raise OpenAIError(404, message, "model_not_found", param="model")
        if record.state is JobState.QUEUED:
            raise _not_ready(f"job {name} is queued: it has no policy yet")
        if not _has_policy(record):
            message = f"job {name} is {record.state} and left no exported checkpoint"
            raise OpenAIError(404, message, "model_not_found", param="model")
        return record

    async def generate(self, request: pb.GenerateRequest) -> Replies:
        """The replies of the first server that accepts the request. Closing the generator aborts the answer.

        Raises:
            OpenAIError: no server accepts it, or the answer breaks off.
        """
        until = time.monotonic() + SERVER_WAIT_S
        while True:
            record = await self.model(request.model)
            refusal: OpenAIError | None = None
            for server in candidates(record, await self._servers()):
                try:
                    async with aclosing(self._call(server, request)) as replies:
                        async for reply in replies:
                            yield reply
                except OpenAIError as error:
                    if not error.retryable:
                        raise
                    refusal = error
                else:
                    return
            if time.monotonic() > until or (refusal is not None and refusal.status == 429):
                raise refusal or _not_ready(_no_server(record))
            await asyncio.sleep(POLL_INTERVAL_S)

    async def _servers(self) -> list[WorkerStatus]:
        """The workers, at most `POLL_INTERVAL_S` old."""
        if time.monotonic() - self._workers[0] > POLL_INTERVAL_S:
            self._workers = (time.monotonic(), await live_workers(self._redis))
        return self._workers[1]

    async def _call(self, server: WorkerStatus, request: pb.GenerateRequest) -> Replies:
        """One server's replies; its error is `retryable` when another server may accept the request."""
        started = False
        stub = pb_grpc.InferenceStub(self._channels.to(server.inference_address or ""))  # type: ignore[no-untyped-call]  # generated code
        call = stub.Generate(request, timeout=CALL_LIMIT_S, metadata=self._metadata)
        try:
            async for reply in call:
                started = started or reply.HasField("started")
                yield reply
        except grpc.aio.AioRpcError as error:
            refusal, retryable = _refusal(error, server)
            refusal.retryable = retryable and not started
            raise refusal from error
        finally:
            call.cancel()


def candidates(record: JobRecord, workers: Sequence[WorkerStatus]) -> list[WorkerStatus]:
    """The servers that may answer for the job, the best first."""
    servers = [
        worker
        for worker in workers
        if worker.kind is WorkerKind.ROLLOUT and worker.inference_address and worker.state != "draining"
    ]
    ranks = {worker.name: rank for worker in servers if (rank := _rank(worker, record)) is not None}
    chosen = [worker for worker in servers if worker.name in ranks]
    random.shuffle(chosen)
    return sorted(chosen, key=lambda worker: (ranks[worker.name], worker.detail.get("chats_in_flight", 0)))


def _rank(worker: WorkerStatus, record: JobRecord) -> int | None:
    """Preference of a server for the job, 0 is best; None when it has no policy of a running job, or samples for another job."""
    if not record.state.ended:
        return 0 if worker.job_id == record.id and worker.policy_version is not None else None
    if worker.job_id == record.id:
        return 0
    if worker.job_id is None:
        return 1
    return 2 if worker.state == "serving" else None


def _has_policy(record: JobRow) -> bool:
    if record.state.ended:
        return record.export is not None
    return record.state is not JobState.QUEUED


def _no_server(record: JobRecord) -> str:
    if record.state.ended:
        return f"job {record.id} has ended, and no rollout server is free to load its checkpoint"
    return f"no rollout server has the policy of job {record.id} loaded yet"


def _refusal(error: grpc.aio.AioRpcError, server: WorkerStatus) -> tuple[OpenAIError, bool]:
    """The error for the client, and whether another server may accept the request."""
    metadata = error.trailing_metadata()
    headers = {str(key): str(value) for key, value in metadata} if metadata is not None else {}
    message = error.details() or "the rollout server broke off"
    if (name := headers.get(REASON_HEADER)) in set(RefusalReason):
        reason = RefusalReason(name)
        status, code = _STATUS[reason]
        param = "model" if reason is RefusalReason.NOT_FOUND else headers.get(PARAM_HEADER)
        retry = RETRY_AFTER_S if status in {429, 503} else None
        return OpenAIError(status, message, code, param=param, retry_after_s=retry), reason in _RETRYABLE
    log.error("rollout server %s: %s: %s", server.name, error.code().name, message)
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        return _not_ready(f"rollout server {server.name} does not answer"), True
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        message = "the gateway and the rollout server have different internal tokens (MILLRACE_INTERNAL_TOKEN)"
        return OpenAIError(500, message, "internal"), True
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return OpenAIError(504, f"no answer within {CALL_LIMIT_S:.0f} s", "timeout"), False
    return OpenAIError(500, "the rollout server failed; its log has it", "internal"), False


def _not_ready(message: str) -> OpenAIError:
    return OpenAIError(503, message, "model_not_ready", retry_after_s=RETRY_AFTER_S)


class Channels:
    """One channel per address. Servers come and go, each on its own port: beyond the bound, the least recently used one is closed."""

    def __init__(self, max_channels: int = MAX_CHANNELS) -> None:
        self._max_channels = max_channels
        self._open: OrderedDict[str, grpc.aio.Channel] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()

    def to(self, address: str) -> grpc.aio.Channel:
        """The channel to `host:port`."""
        if address not in self._open:
            self._open[address] = grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)
        self._open.move_to_end(address)
        while len(self._open) > self._max_channels:
            _, oldest = self._open.popitem(last=False)
            task = asyncio.create_task(oldest.close(GRACE_S), name="close channel")
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        return self._open[address]

    async def close(self) -> None:
        """Closes all connections at once."""
        channels, self._open = list(self._open.values()), OrderedDict()
        for task in self._closing:
            task.cancel()
        await asyncio.gather(*(channel.close() for channel in channels), *self._closing, return_exceptions=True)
