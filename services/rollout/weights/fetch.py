"""Fetch of one version, over as many calls as necessary.

the learner's file, where it is on this host ─┐ no
another server, where the learner names one  ─┤ failed
the learner's stream: a delta, or everything ─┘ resumed where it broke
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import grpc

from services.common.errors import WeightSyncError
from services.common.pb import weight_sync_pb2 as pb
from services.common.pb import weight_sync_pb2_grpc as pb_grpc
from services.common.service.host import boot_id
from services.common.weight_sync.staging import Stage, StagedWeights
from services.common.weights.channel import CLIENT_OPTIONS, Metadata
from services.common.weights.snapshot import PolicyVersion, TensorSpec
from services.common.weights.tensor_file import map_tensors
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
    apart: threading.Event
    """Set when a file of the learner could not be taken: its files are elsewhere."""


class Relay:
    """Another rollout server, from which a version is fetched."""

    def __init__(self, address: str) -> None:
        """Connects on first use."""
        self.address = address
        self._channel = grpc.insecure_channel(address, options=CLIENT_OPTIONS)
        self.stub = pb_grpc.WeightSyncStub(self._channel)  # type: ignore[no-untyped-call]  # generated code

    def close(self) -> None:
        """Ends the connection."""
        self._channel.close()


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
        self._fetched: Held | None = None
        self._by_file, self._by_relay = not source.apart.is_set(), True
        self._relay: Relay | None = None
        self._digest: bytes | None = None
        """Of the learner's manifest, which a relay's must have too."""
        self._wire_bytes = 0
        self._furthest = 0
        self._tries = 0

    def run(self) -> Held:
        """Returns the staged version, or raises the errors of `WeightReceiver.fetch` with nothing in the stage."""
        try:
            while self._fetched is None:
                fault = self._attempt()
                if fault is not None:
                    self._pause(fault)
            return self._fetched
        finally:
            self._restart()
            self._leave_relay()

    @property
    def _offset(self) -> int:
        return self._transfer.received if self._transfer is not None else 0

    def _attempt(self) -> str | None:
        """Makes one Fetch call; returns the fault if another call, after a while, can repair it."""
        try:
            self._call()
        except (WeightSyncError, grpc.RpcError) as error:
            if self._relay is None:
                return self._fault(error)
            fault = describe(error) if isinstance(error, grpc.RpcError) else str(error)
            log.warning("version %s from %s: %s; asking the learner", self._version, self._relay.address, fault)
            if not isinstance(error, (BrokenStream, grpc.RpcError)):  # what has come so far may be wrong, too
                self._restart()
            self._leave_relay()
            self._by_relay = False
        return None

    def _fault(self, error: WeightSyncError | grpc.RpcError) -> str:
        """The fault that the learner's own stream had; raises WeightSyncError when no other call can repair it."""
        if isinstance(error, BrokenStream):
            return str(error)
        if isinstance(error, grpc.RpcError):
            if error.code() in PERMANENT_STATUSES:
                raise WeightSyncError(f"version {self._version}: {describe(error)}") from error
            if error.code() is grpc.StatusCode.OUT_OF_RANGE:  # the server uses another encoding now
                self._restart()
            return describe(error)
        if self._base is None:
            raise WeightSyncError(f"version {self._version}: {error}") from error
        log.warning("version %s by delta from %s: %s; fetching it whole", self._version, self._base, error)
        self._base, self._furthest = None, 0
        self._restart()
        return str(error)

    def _call(self) -> None:
        source = self._source
        if source.closed.is_set():
            raise BrokenStream("the receiver is closed")
        request = pb.FetchRequest(
            job_id=source.job_id, server=source.server, version=self._version.message(),
            base=self._base.message() if self._base else None, offset=self._offset,
            boot_id=boot_id() if self._by_file and self._relay is None else "",
            relays=self._by_relay and self._relay is None,
        )  # fmt: skip
        stub = source.stub if self._relay is None else self._relay.stub
        timeout_s = max(0.001, min(_CALL_TIMEOUT_S, self._deadline - time.monotonic()))
        try:
            call = stub.Fetch(request, timeout=timeout_s, metadata=source.metadata)
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
        plan = read_manifest(first.manifest, self._version, self._base)
        self._check_layout(plan)
        second = next(replies, None)
        match second.WhichOneof("part") if second is not None else None:
            case "file" if second is not None and self._by_file:
                self._link(plan, Path(second.file.path))
            case "relay" if second is not None and self._by_relay and self._relay is None:
                self._digest, self._relay = plan.digest, Relay(second.relay.address)
            case _:
                self._receive(plan, chain([] if second is None else [second], replies))

    def _receive(self, plan: Plan, replies: Iterator[pb.FetchReply]) -> None:
        """Takes the chunks, and commits."""
        transfer = self._begin(plan)
        for reply in replies:
            if reply.WhichOneof("part") != "chunk":
                raise BrokenStream(f"something other than a chunk came at offset {transfer.received}")
            chunk = reply.chunk
            data = chunk.data  # read once: every access copies the bytes
            self._wire_bytes += len(data)
            transfer.accept(chunk.offset, data, chunk.checksum)
        if not transfer.complete:
            raise BrokenStream(f"the stream ended at offset {transfer.received}, before the last tensor")
        seconds = time.monotonic() - self._started
        self._fetched = Held(transfer.commit(fetch_s=seconds, wire_bytes=self._wire_bytes), plan.specs)

    def _link(self, plan: Plan, path: Path) -> None:
        """Takes the learner's file; where that is not possible, the next call asks for the bytes."""
        try:
            self._fetched = Held(self._stage.link(self._version, path, plan.specs, self._started), plan.specs)
        except OSError as error:
            log.info("the learner's files cannot be taken here (%s): its versions come as bytes", error)
            self._source.apart.set()
            self._by_file = False
        except WeightSyncError as error:
            log.warning("version %s by its file: %s; fetching its bytes", self._version, error)
            self._by_file = False

    def _leave_relay(self) -> None:
        if self._relay is not None:
            self._relay.close()
            self._relay = None

    def _begin(self, plan: Plan) -> Transfer:
        """The transfer to continue, or a new one."""
        if self._relay is not None and plan.digest != self._digest:
            raise WeightSyncError("the relay has other weights than the learner")
        if self._transfer is not None and self._transfer.plan != plan:
            self._restart()
            raise BrokenStream("the server encodes the version otherwise than before")
        if self._transfer is None:
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
