"""Fetch of one version, over as many calls as necessary: resumes broken streams, falls back from a delta to the full version."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import grpc

from services.common.errors import WeightSyncError
from services.common.pb import weight_sync_pb2 as pb
from services.common.pb import weight_sync_pb2_grpc as pb_grpc
from services.common.weights.channel import Metadata
from services.common.weights.snapshot import PolicyVersion, TensorSpec
from services.common.weights.tensor_file import map_tensors
from services.rollout.engine.types import StagedWeights
from services.rollout.weights.staging import Stage
from services.rollout.weights.transfer import PERMANENT_STATUSES, BrokenStream, Plan, Transfer, describe, read_manifest

log = logging.getLogger(__name__)

_CALL_TIMEOUT_S = 120.0  # of one Fetch call; the next one continues where it ended
_TRIES = 5  # calls in a row without progress
_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 3.0


@dataclass(frozen=True, slots=True)
class Held:
    """A version in the stage, which can be the base of a delta."""

    weights: StagedWeights
    specs: tuple[TensorSpec, ...]

    @property
    def version(self) -> PolicyVersion:
        """Of the policy."""
        return PolicyVersion(self.weights.lineage, self.weights.policy_version)


@dataclass(frozen=True, slots=True)
class Source:
    """Source of the versions: one learner's weights of one job."""

    stub: pb_grpc.WeightSyncStub
    job_id: str
    server: str
    """This rollout server's name."""
    metadata: Metadata
    closed: threading.Event


class Download:
    """Download of one version; call `run` once."""

    def __init__(
        self, source: Source, version: PolicyVersion, held: Held | None, stage: Stage, deadline: float
    ) -> None:
        """`held`: possible base of a delta, with the layout that the version must have. `deadline`: monotonic seconds."""
        self._source, self._version, self._stage = source, version, stage
        self._started, self._deadline = time.monotonic(), deadline
        self._held = held
        self._base = held.version if held is not None else None
        self._transfer: Transfer | None = None
        self._wire_bytes = 0
        self._furthest = 0
        self._tries = 0

    def run(self) -> Held:
        """Returns the staged version, or raises the errors of `WeightReceiver.fetch` with nothing in the stage."""
        try:
            while True:
                fault = self._attempt()
                if fault is None and self._transfer is not None:
                    seconds = time.monotonic() - self._started
                    specs = self._transfer.plan.specs
                    return Held(self._transfer.commit(fetch_s=seconds, wire_bytes=self._wire_bytes), specs)
                self._pause(fault or "no manifest came")
        finally:
            self._restart()

    @property
    def _offset(self) -> int:
        return self._transfer.received if self._transfer is not None else 0

    def _attempt(self) -> str | None:
        """Makes one Fetch call; returns the fault if another call can repair it."""
        try:
            self._call()
        except BrokenStream as error:
            return str(error)
        except WeightSyncError as error:
            if self._base is None:
                raise WeightSyncError(f"version {self._version}: {error}") from error
            log.warning("version %s by delta from %s: %s; fetching it whole", self._version, self._base, error)
            self._base, self._furthest = None, 0
            self._restart()
            return str(error)
        except grpc.RpcError as error:
            if error.code() in PERMANENT_STATUSES:
                raise WeightSyncError(f"version {self._version}: {describe(error)}") from error
            if error.code() is grpc.StatusCode.OUT_OF_RANGE:  # the server uses another encoding now
                self._restart()
            return describe(error)
        return None

    def _call(self) -> None:
        source = self._source
        if source.closed.is_set():
            raise BrokenStream("the receiver is closed")
        request = pb.FetchRequest(
            job_id=source.job_id, server=source.server, version=self._version.message(),
            base=self._base.message() if self._base else None, offset=self._offset,
        )  # fmt: skip
        timeout_s = max(0.001, min(_CALL_TIMEOUT_S, self._deadline - time.monotonic()))
        try:
            call = source.stub.Fetch(request, timeout=timeout_s, metadata=source.metadata)
        except ValueError as error:  # grpc's error for a channel that was closed meanwhile
            raise BrokenStream(f"the receiver is closed: {error}") from error
        try:
            self._take(iter(call))
        finally:
            call.cancel()

    def _take(self, replies: Iterator[pb.FetchReply]) -> None:
        first = next(replies, None)
        if first is None or first.WhichOneof("part") != "manifest":
            raise BrokenStream("the stream did not begin with a manifest")
        transfer = self._begin(read_manifest(first.manifest, self._version, self._base))
        for reply in replies:
            if reply.WhichOneof("part") != "chunk":
                raise BrokenStream(f"something other than a chunk came at offset {transfer.received}")
            chunk = reply.chunk
            data = chunk.data  # read once: every access copies the bytes
            self._wire_bytes += len(data)
            transfer.accept(chunk.offset, data, chunk.checksum)
        if not transfer.complete:
            raise BrokenStream(f"the stream ended at offset {transfer.received}, before the last tensor")

    def _begin(self, plan: Plan) -> Transfer:
        """The transfer to continue, or a new one."""
        if self._transfer is not None and self._transfer.plan != plan:
            self._restart()
            raise BrokenStream("the server encodes the version otherwise than before")
        if self._transfer is None:
            self._check_layout(plan)
            base = map_tensors(self._held.weights.path) if plan.base is not None and self._held is not None else {}
            self._transfer = Transfer(plan, self._stage, base)
        return self._transfer

    def _check_layout(self, plan: Plan) -> None:
        """Checks that names, dtypes and shapes are those of the version before: within a job they never change."""
        if self._held is None:
            return
        for new, old in zip(plan.specs, self._held.specs, strict=False):
            if not new.same_layout(old):
                raise WeightSyncError(
                    f"{new.name} {new.dtype} {new.shape} came where {old.name} {old.dtype} {old.shape} was"
                )
        if len(plan.specs) != len(self._held.specs):
            raise WeightSyncError(f"{len(plan.specs)} tensors came where {len(self._held.specs)} were")

    def _restart(self) -> None:
        if self._transfer is not None:
            self._transfer.discard()
            self._transfer = None

    def _pause(self, fault: str) -> None:
        """Waits before the next call, longer each time; raises WeightSyncError if there must be no next call."""
        offset = self._offset
        self._tries = 1 if offset > self._furthest else self._tries + 1
        self._furthest = max(self._furthest, offset)
        why = f"{self._tries} tries without progress" if self._tries >= _TRIES else ""
        if time.monotonic() >= self._deadline:
            why = "deadline"
        if self._source.closed.is_set():
            why = "the receiver was closed"
        if why:
            raise WeightSyncError(f"version {self._version}: gave up at offset {offset} ({why}): {fault}")
        self._source.closed.wait(min(_BACKOFF_S * 2**self._tries, _MAX_BACKOFF_S))
