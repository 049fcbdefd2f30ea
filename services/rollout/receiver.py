"""The rollout server's end of the weight transfer: hears of versions, brings them into the stage, reports what became of them.

    watch() ──► (lineage, n) ──► fetch(lineage, n) ──► StagedWeights ──► the engine applies ──► report(…)
    any newer version            blocking: run it in a thread
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Self

import grpc

from services.common.errors import WeightSyncError
from services.common.pb import weight_sync_pb2 as pb
from services.common.pb import weight_sync_pb2_grpc as pb_grpc
from services.common.snapshot import TensorSpec, UInt8Array
from services.common.weight_channel import CLIENT_OPTIONS, token_metadata
from services.rollout.announcements import Announcements
from services.rollout.stage import Stage, StagedWeights
from services.rollout.tensor_file import map_tensors
from services.rollout.transfer import BrokenStream, Plan, Transfer, read_manifest

log = logging.getLogger(__name__)

_CALL_S = 120.0  # deadline of one Fetch; one that got further is asked to go on
_REPORT_S = 10.0
_TRIES = 5  # in a row without a new byte
_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 3.0
_HOPELESS = {
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
}


class WeightReceiver:
    """One job's weights, from one learner, for one rollout server."""

    def __init__(self, address: str, job_id: str, server: str, stage: Stage, token: str | None = None) -> None:
        """Connects lazily; `server` is this rollout server's stable name."""
        self._address, self._job_id, self._server, self._stage = address, job_id, server, stage
        self._metadata = token_metadata(token)
        self._channel = grpc.insecure_channel(address, options=CLIENT_OPTIONS)
        self._stub = pb_grpc.WeightSyncStub(self._channel)  # type: ignore[no-untyped-call]  # generated code
        self._fetching = threading.Lock()
        self._closed = threading.Event()
        self._held: StagedWeights | None = None
        self._held_specs: tuple[TensorSpec, ...] = ()

    async def watch(self, *, unreachable_s: float = 60.0) -> AsyncIterator[tuple[int, int]]:
        """Versions as (lineage, n), each newer than the one before; those that a slow caller missed are left out. Ends after `close`.

        Raises:
            WeightSyncError: refused (wrong token, another job), or nothing was heard for `unreachable_s` seconds of trying.
        """
        request = pb.WatchRequest(job_id=self._job_id, server=self._server)
        announcements = Announcements(self._stub, request, self._metadata, self._closed, unreachable_s)
        async for version in announcements.follow():
            yield version

    def fetch(self, lineage: int, n: int, *, deadline_s: float = 1800.0) -> StagedWeights:
        """Brings the version into the stage, whole and verified: by a delta from the one fetched last where possible, else in full.

        Blocks; one fetch at a time. Nothing is visible in the stage unless this returns.

        Raises:
            WeightSyncError: the version is not to be had, broke off too often, or failed verification; says what and where.
        """
        if not self._fetching.acquire(timeout=deadline_s):
            raise WeightSyncError(f"version {(lineage, n)}: another fetch went on for {deadline_s:.0f} s")
        try:
            held = self._held if self._held is not None and self._held.path.exists() else None
            if held is not None and (held.lineage, held.policy_version) == (lineage, n):
                return held
            started = time.monotonic()
            deadline = started + deadline_s
            if held is not None:
                try:
                    return self._download((lineage, n), held, started, deadline)
                except _NotByDelta as error:
                    log.warning("version %s: %s; fetching it in full", (lineage, n), error)
            return self._download((lineage, n), None, started, deadline)
        finally:
            self._fetching.release()

    def report(
        self,
        lineage: int,
        n: int,
        *,
        error: str = "",
        fetch_s: float = 0.0,
        pause_s: float = 0.0,
        apply_s: float = 0.0,
        wire_bytes: int = 0,
    ) -> tuple[int, int] | None:
        """Tells the learner that the version is active (no `error`) or what went wrong; returns the newest version there is.

        Raises:
            WeightSyncError: the learner did not answer.
        """
        request = pb.ReportRequest(
            job_id=self._job_id,
            server=self._server,
            version=pb.Version(lineage=lineage, n=n),
            error=error,
            fetch_seconds=fetch_s,
            pause_seconds=pause_s,
            apply_seconds=apply_s,
            wire_bytes=wire_bytes,
        )
        try:
            reply: pb.ReportReply = self._stub.Report(request, timeout=_REPORT_S, metadata=self._metadata)
        except grpc.RpcError as failure:
            raise WeightSyncError(f"report of version {(lineage, n)} to {self._address}: {describe(failure)}") from failure
        return (reply.current.lineage, reply.current.n) if reply.HasField("current") else None

    def close(self) -> None:
        """Ends a watch and a fetch that are under way (the fetch raises). The stage stays."""
        self._closed.set()
        self._channel.close()
