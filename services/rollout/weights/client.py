"""Client of the weight transfer: receives announcements of versions, fetches versions into the stage, reports their outcome.

watch() ──► version ──► fetch(lineage, n) ──► StagedWeights ──► the engine applies ──► report(…)
any news                blocking: run it in a thread
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
import time
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import grpc

from services.common.errors import WeightSyncError
from services.common.pb import weight_sync_pb2 as pb
from services.common.pb import weight_sync_pb2_grpc as pb_grpc
from services.common.weight_sync.staging import Stage, StagedWeights
from services.common.weights.channel import CLIENT_OPTIONS, Metadata, token_metadata
from services.common.weights.snapshot import PolicyVersion
from services.rollout.weights.fetch import Download, Held, Source
from services.rollout.weights.relaying import Relaying
from services.rollout.weights.transfer import PERMANENT_STATUSES, describe

log = logging.getLogger(__name__)

_REPORT_TIMEOUT_S = 10.0
_CALL_TIMEOUT_S = 120.0  # of one Watch call; the next one follows it
_BACKOFF_S = 0.2
_MAX_BACKOFF_S = 5.0


class Announced(NamedTuple):
    """News of a learner."""

    version: PolicyVersion
    """The newest."""
    learner_computes: bool = False
    """Whether it is the learner's turn on shared devices: nothing may be sampled."""


class WeightReceiver:
    """One job's weights, from one learner, for one rollout server."""

    def __init__(
        self,
        address: str,
        job_id: str,
        server: str,
        stage: Stage,
        token: str | None = None,
        relay: Relaying | None = None,
    ) -> None:
        """Connects on first use; `server`: this rollout server's stable name; `relay`: gives on what comes over the network."""
        self._address, self._stage = address, stage
        self._channel = grpc.insecure_channel(address, options=CLIENT_OPTIONS)
        stub = pb_grpc.WeightSyncStub(self._channel)  # type: ignore[no-untyped-call]  # generated code
        self._source = Source(stub, job_id, server, token_metadata(token), threading.Event(), threading.Event())
        self._fetching = threading.Lock()
        self._relay = relay
        self._held: Held | None = None
        self._watches: list[Announcements] = []

    async def watch(self, *, unreachable_s: float = 60.0) -> AsyncIterator[Announced]:
        """News, each with a newer version than before, or the begin or end of a turn; a slow caller gets only the newest.

        Ends after `close`. A turn ends, too, when the learner cannot be reached.

        Raises:
            WeightSyncError: refused (wrong token, another job), or the learner could not be reached for `unreachable_s` seconds.
        """
        request = pb.WatchRequest(job_id=self._source.job_id, server=self._source.server)
        announcements = Announcements(self._source.stub, request, self._source.metadata, unreachable_s)
        self._watches.append(announcements)
        try:
            async for news in announcements.follow():
                yield news
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
            if self._relay is not None and self._held.weights.wire_bytes:
                self._relay.offer(self._held)
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
            relay=self._relay.address if self._relay is not None else "",
        )  # fmt: skip
        reply = self._send(request, f"report of version {version}")
        return PolicyVersion.of(reply.current) if reply.HasField("current") else None

    def _send(self, request: pb.ReportRequest, what: str) -> pb.ReportReply:
        source = self._source
        try:
            reply: pb.ReportReply = source.stub.Report(request, timeout=_REPORT_TIMEOUT_S, metadata=source.metadata)
        except (grpc.RpcError, ValueError) as failure:
            why = describe(failure) if isinstance(failure, grpc.RpcError) else str(failure)
            raise WeightSyncError(f"{what} to {self._address}: {why}") from failure
        return reply

    def report_yielded(self, version: PolicyVersion) -> None:
        """Reports that nothing is sampled until the learner's turn ends. Blocks for at most 10 s.

        Raises:
            WeightSyncError: the learner did not answer.
        """
        source = self._source
        request = pb.ReportRequest(job_id=source.job_id, server=source.server, version=version.message(), yielded=True)
        self._send(request, f"report of a turn at version {version}")

    def close(self) -> None:
        """Ends a watch and a fetch that are in progress (the fetch raises). The stage and its files stay."""
        self._source.closed.set()
        for watch in list(self._watches):
            watch.stop()
        self._channel.close()


class Announcements:
    """One watch: `follow` may be used once."""

    def __init__(
        self, stub: pb_grpc.WeightSyncStub, request: pb.WatchRequest, metadata: Metadata, unreachable_s: float
    ) -> None:
        self._stub, self._request, self._metadata = stub, request, metadata
        self._unreachable_s = unreachable_s
        self._stop = threading.Event()
        self._call: Any = None
        self._newest: Announced | None = None
        self._fault: WeightSyncError | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()

    async def follow(self) -> AsyncIterator[Announced]:
        """News until `stop`, in the order and with the errors of `WeightReceiver.watch`."""
        self._loop = asyncio.get_running_loop()
        reader = threading.Thread(target=self._read, name="announcements", daemon=True)
        reader.start()
        seen: Announced | None = None
        try:
            while True:
                await self._changed.wait()  # no deadline: the reader's calls have deadlines, and its end sets the event
                self._changed.clear()
                newest = self._newest
                if newest is not None and newest != seen and (seen is None or newest.version >= seen.version):
                    seen = newest
                    yield newest
                    self._changed.set()  # the end may have come meanwhile: check again
                elif self._fault is not None:
                    raise self._fault
                elif self._stop.is_set():
                    return
        finally:
            self.stop()

    def stop(self) -> None:
        """Ends the watch; may be called from any thread."""
        self._stop.set()
        if self._call is not None:
            self._call.cancel()
        self._notify()

    def _read(self) -> None:
        """Watches until `stop` or a fault; runs in its own thread."""
        last_contact, backoff = time.monotonic(), _BACKOFF_S
        while not self._stop.is_set():
            fault = "the watch ended"
            try:
                self._call = self._stub.Watch(self._request, timeout=_CALL_TIMEOUT_S, metadata=self._metadata)
                if self._stop.is_set():  # `stop` came before there was a call to cancel
                    self._call.cancel()
                for announcement in self._call:
                    version = PolicyVersion.of(announcement.version)
                    self._newest = Announced(version, announcement.learner_computes)
                    last_contact, backoff = time.monotonic(), _BACKOFF_S
                    self._notify()
                last_contact = time.monotonic()
            except grpc.RpcError as error:
                fault = describe(error)
                if error.code() in PERMANENT_STATUSES:
                    return self._end(f"watch refused: {fault}")
                if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:  # no new version, on a working connection
                    last_contact = time.monotonic()
                else:
                    self._end_turn()
            except ValueError:  # the channel was closed between two calls
                return self._end("the receiver is closed")
            if time.monotonic() - last_contact > self._unreachable_s:
                return self._end(f"not reachable for {self._unreachable_s:g} s: {fault}")
            self._stop.wait(backoff * random.uniform(0.5, 1.0))  # noqa: S311  spreads reconnects, hides nothing
            backoff = min(2 * backoff, _MAX_BACKOFF_S)
        return None

    def _end_turn(self) -> None:
        """The learner, or the way to it, is gone: it does not compute, as far as this server knows."""
        if self._newest is not None and self._newest.learner_computes:
            self._newest = self._newest._replace(learner_computes=False)
            self._notify()

    def _end(self, fault: str) -> None:
        if not self._stop.is_set():
            self._fault = WeightSyncError(f"watching job {self._request.job_id}: {fault}")
        self._notify()

    def _notify(self) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended: there is no reader
                self._loop.call_soon_threadsafe(self._changed.set)
