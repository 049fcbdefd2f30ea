"""Client of the weight transfer: receives announcements of versions, fetches versions into the stage, reports their outcome.

watch() ──► (lineage, n) ──► fetch(lineage, n) ──► StagedWeights ──► the engine applies ──► report(…)
any newer version            blocking: run it in a thread
"""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator

import grpc

from services.common.errors import WeightSyncError
from services.common.pb import weight_sync_pb2 as pb
from services.common.pb import weight_sync_pb2_grpc as pb_grpc
from services.common.weights.channel import CLIENT_OPTIONS, token_metadata
from services.common.weights.version import PolicyVersion
from services.rollout.engine.types import StagedWeights
from services.rollout.weights.fetch import Download, Held, Source
from services.rollout.weights.staging import Stage
from services.rollout.weights.transfer import describe
from services.rollout.weights.watch import Announcements

_REPORT_TIMEOUT_S = 10.0


class WeightReceiver:
    """One job's weights, from one learner, for one rollout server."""

    def __init__(self, address: str, job_id: str, server: str, stage: Stage, token: str | None = None) -> None:
        """Connects on first use; `server`: this rollout server's stable name."""
        self._address, self._stage = address, stage
        self._channel = grpc.insecure_channel(address, options=CLIENT_OPTIONS)
        stub = pb_grpc.WeightSyncStub(self._channel)  # type: ignore[no-untyped-call]  # generated code
        self._source = Source(stub, job_id, server, token_metadata(token), threading.Event())
        self._fetching = threading.Lock()
        self._held: Held | None = None
        self._watches: list[Announcements] = []

    async def watch(self, *, unreachable_s: float = 60.0) -> AsyncIterator[PolicyVersion]:
        """Versions, each newer than the one before; a slow caller gets only the newest. Ends after `close`.

        Raises:
            WeightSyncError: refused (wrong token, another job), or the learner could not be reached for `unreachable_s` seconds.
        """
        request = pb.WatchRequest(job_id=self._source.job_id, server=self._source.server)
        announcements = Announcements(self._source.stub, request, self._source.metadata, unreachable_s)
        self._watches.append(announcements)
        try:
            async for version in announcements.follow():
                yield version
        finally:
            announcements.stop()
            self._watches.remove(announcements)

    def fetch(self, lineage: int, n: int, *, deadline_s: float = 1800.0) -> StagedWeights:
        """Fetches the version into the stage, complete and verified: by a delta from the one fetched last if possible, else in full.

        Blocks; one fetch at a time. Nothing is visible in the stage unless this returns.

        Raises:
            WeightSyncError: the version is not available, broke off too often, or failed verification; names the place.
        """
        version, deadline = PolicyVersion(lineage, n), time.monotonic() + deadline_s
        if not self._fetching.acquire(timeout=deadline_s):
            raise WeightSyncError(f"version {version}: another fetch went on for {deadline_s:.0f} s")
        try:
            if self._held is not None and not self._held.weights.path.exists():
                self._held = None
            if self._held is None or self._held.version != version:
                self._held = Download(self._source, version, self._held, self._stage, deadline).run()
            return self._held.weights
        finally:
            self._fetching.release()

    def report(
        self, lineage: int, n: int, *, error: str = "", fetch_s: float = 0.0, pause_s: float = 0.0,
        apply_s: float = 0.0, wire_bytes: int = 0,
    ) -> PolicyVersion | None:  # fmt: skip
        """Reports that the version is active, or its `error`; returns the learner's newest version. Blocks for at most 10 s.

        Raises:
            WeightSyncError: the learner did not answer.
        """
        source, version = self._source, PolicyVersion(lineage, n)
        request = pb.ReportRequest(
            job_id=source.job_id, server=source.server, version=version.message(), error=error,
            fetch_seconds=fetch_s, pause_seconds=pause_s, apply_seconds=apply_s, wire_bytes=wire_bytes,
        )  # fmt: skip
        try:
            reply: pb.ReportReply = source.stub.Report(request, timeout=_REPORT_TIMEOUT_S, metadata=source.metadata)
        except (grpc.RpcError, ValueError) as failure:
            why = describe(failure) if isinstance(failure, grpc.RpcError) else str(failure)
            raise WeightSyncError(f"report of version {version} to {self._address}: {why}") from failure
        return PolicyVersion.of(reply.current) if reply.HasField("current") else None

    def close(self) -> None:
        """Ends a watch and a fetch that are in progress (the fetch raises). The stage and its files stay."""
        self._source.closed.set()
        for watch in list(self._watches):
            watch.stop()
        self._channel.close()
