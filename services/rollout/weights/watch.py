"""Watch of announced versions: a thread receives them, asyncio gets the newest; a slow reader skips the older ones."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc

from services.common.errors import WeightSyncError
from services.common.pb import weight_sync_pb2 as pb
from services.common.pb import weight_sync_pb2_grpc as pb_grpc
from services.common.weights.channel import Metadata
from services.common.weights.version import PolicyVersion
from services.rollout.weights.transfer import PERMANENT_STATUSES, describe

log = logging.getLogger(__name__)

_CALL_TIMEOUT_S = 120.0  # of one Watch call; the next one follows it
_BACKOFF_S = 0.2
_MAX_BACKOFF_S = 5.0


class Announcements:
    """One watch: `follow` may be used once."""

    def __init__(
        self, stub: pb_grpc.WeightSyncStub, request: pb.WatchRequest, metadata: Metadata, unreachable_s: float
    ) -> None:
        self._stub, self._request, self._metadata = stub, request, metadata
        self._unreachable_s = unreachable_s
        self._stop = threading.Event()
        self._call: Any = None
        self._newest: PolicyVersion | None = None
        self._fault: WeightSyncError | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()

    async def follow(self) -> AsyncIterator[PolicyVersion]:
        """Versions, each newer than the one before, until `stop`.

        Raises:
            WeightSyncError: refused, or the learner could not be reached for `unreachable_s` seconds.
        """
        self._loop = asyncio.get_running_loop()
        reader = threading.Thread(target=self._read, name="announcements", daemon=True)
        reader.start()
        seen: PolicyVersion | None = None
        try:
            while True:
                await self._changed.wait()  # no deadline: the reader's calls have deadlines, and its end sets the event
                self._changed.clear()
                newest = self._newest
                if newest is not None and (seen is None or newest > seen):
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
                    self._newest = PolicyVersion.of(announcement.version)
                    last_contact, backoff = time.monotonic(), _BACKOFF_S
                    self._notify()
                last_contact = time.monotonic()
            except grpc.RpcError as error:
                fault = describe(error)
                if error.code() in PERMANENT_STATUSES:
                    return self._end(f"watch refused: {fault}")
                if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:  # no new version, on a working connection
                    last_contact = time.monotonic()
            except ValueError:  # the channel was closed between two calls
                return self._end("the receiver is closed")
            if time.monotonic() - last_contact > self._unreachable_s:
                return self._end(f"not reachable for {self._unreachable_s:g} s: {fault}")
            self._stop.wait(backoff * random.uniform(0.5, 1.0))  # noqa: S311  spreads reconnects, hides nothing
            backoff = min(2 * backoff, _MAX_BACKOFF_S)
        return None

    def _end(self, fault: str) -> None:
        if not self._stop.is_set():
            self._fault = WeightSyncError(f"watching job {self._request.job_id}: {fault}")
        self._notify()

    def _notify(self) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended: there is no reader
                self._loop.call_soon_threadsafe(self._changed.set)
