"""Versions travel bit for bit: in full, by delta, to late joiners, to several servers at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest

from services.common.errors import WeightSyncError
from services.common.pb import weight_sync_pb2 as pb
from services.common.pb import weight_sync_pb2_grpc as pb_grpc
from services.common.weight_sync.server import WeightServer
from services.common.weight_sync.staging import StagedWeights
from services.common.weights import delta
from services.common.weights.snapshot import Snapshot, UInt8Array
from services.common.weights.tensor_file import map_tensors
from services.rollout.weights.client import WeightReceiver

Receive = Callable[..., WeightReceiver]
MakeSnapshot = Callable[..., Snapshot]


def assert_bit_equal(staged: StagedWeights, snapshot: Snapshot) -> None:
    assert (staged.lineage, staged.policy_version) == snapshot.version
    mapped = map_tensors(staged.path)
    assert mapped.keys() == {spec.name for spec in snapshot.tensors}
    for spec, data in zip(snapshot.tensors, snapshot.data, strict=True):
        np.testing.assert_array_equal(mapped[spec.name], data)
    assert staged.digests == {spec.name: spec.digest.hex() for spec in snapshot.tensors}


def test_a_full_fetch_is_bit_equal(publisher: WeightServer, receive: Receive, make_snapshot: MakeSnapshot) -> None:
    publisher.publish(make_snapshot(0))
    staged = receive(publisher.address).fetch(1, 0)
    assert_bit_equal(staged, make_snapshot(0))
    assert staged.wire_bytes == staged.total_bytes == make_snapshot(0).total_bytes
    assert staged.fetch_s > 0


def test_a_delta_is_bit_equal_and_much_smaller(
    publisher: WeightServer, receive: Receive, make_snapshot: MakeSnapshot
) -> None:
    receiver = receive(publisher.address)
    for n in range(3):
        publisher.publish(make_snapshot(n))
        staged = receiver.fetch(1, n)
        assert_bit_equal(staged, make_snapshot(n))
        if n:
            assert 0 < staged.wire_bytes < 0.1 * staged.total_bytes


def test_a_version_that_changed_everywhere_comes_in_full(
    publisher: WeightServer, receive: Receive, make_snapshot: MakeSnapshot
) -> None:
    receiver = receive(publisher.address)
    publisher.publish(make_snapshot(0))
    receiver.fetch(1, 0)
    rng = np.random.default_rng(9)
    other = {
        spec.name: (spec.dtype, spec.shape, rng.integers(0, 256, spec.nbytes, np.uint8))
        for spec in make_snapshot(0).tensors
    }
    publisher.publish(Snapshot.build(1, 1, other))
    staged = receiver.fetch(1, 1)
    assert staged.wire_bytes == staged.total_bytes
    assert_bit_equal(staged, Snapshot.build(1, 1, other))


def test_a_base_that_the_learner_no_longer_keeps_means_a_full_fetch(
    publisher: WeightServer, receive: Receive, make_snapshot: MakeSnapshot
) -> None:
    receiver = receive(publisher.address)
    publisher.publish(make_snapshot(0))
    receiver.fetch(1, 0)
    for n in range(1, 4):  # keep=3: version 0 goes
        publisher.publish(make_snapshot(n))
    staged = receiver.fetch(1, 3)
    assert staged.wire_bytes == staged.total_bytes
    assert_bit_equal(staged, make_snapshot(3))


def test_a_rollback_of_the_learner_is_a_delta_within_the_new_lineage(
    publisher: WeightServer, receive: Receive, make_snapshot: MakeSnapshot
) -> None:
    receiver = receive(publisher.address)
    publisher.publish(make_snapshot(5))
    receiver.fetch(1, 5)
    publisher.publish(make_snapshot(3, lineage=2))
    assert_bit_equal(receiver.fetch(2, 3), make_snapshot(3, lineage=2))


def test_a_server_that_joins_late_gets_the_current_version_whole(
    publisher: WeightServer, receive: Receive, make_snapshot: MakeSnapshot
) -> None:
    for n in range(3):
        publisher.publish(make_snapshot(n))
    assert_bit_equal(receive(publisher.address, "late").fetch(1, 2), make_snapshot(2))


def test_a_snapshot_of_empty_tensors_travels_too(publisher: WeightServer, receive: Receive) -> None:
    receiver = receive(publisher.address)
    for n in range(2):
        publisher.publish(Snapshot.build(1, n, {name: ("float32", (0, 2), np.zeros(0, np.uint8)) for name in "ab"}))
        assert receiver.fetch(1, n).total_bytes == 0


def test_fetching_what_is_held_sends_nothing_again(
    publisher: WeightServer, receive: Receive, make_snapshot: MakeSnapshot
) -> None:
    publisher.publish(make_snapshot(0))
    receiver = receive(publisher.address)
    first = receiver.fetch(1, 0)
    assert receiver.fetch(1, 0) is first
    first.path.unlink()
    assert_bit_equal(receiver.fetch(1, 0), make_snapshot(0))


def test_four_servers_at_once_share_one_encoded_delta(
    publisher: WeightServer, receive: Receive, make_snapshot: MakeSnapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    receivers = [receive(publisher.address, f"r{i}") for i in range(4)]
    publisher.publish(make_snapshot(0))
    with ThreadPoolExecutor(4) as pool:
        for staged in pool.map(lambda receiver: receiver.fetch(1, 0), receivers):
            assert_bit_equal(staged, make_snapshot(0))
        publisher.publish(make_snapshot(1))
        encoded: list[int] = []
        plain_encode = delta.encode

        def counting(data: UInt8Array, base: UInt8Array) -> bytes:
            encoded.append(data.nbytes)
            return plain_encode(data, base)

        monkeypatch.setattr(delta, "encode", counting)
        for staged in pool.map(lambda receiver: receiver.fetch(1, 1), receivers):
            assert_bit_equal(staged, make_snapshot(1))
            assert staged.wire_bytes < 0.1 * staged.total_bytes
    assert len(encoded) == len(make_snapshot(1).tensors)


def test_publishing_waits_for_no_server_and_a_transfer_under_way_keeps_its_version(
    publisher: WeightServer, make_snapshot: MakeSnapshot
) -> None:
    snapshots = [make_snapshot(n) for n in range(5)]
    publisher.publish(snapshots[0])
    with grpc.insecure_channel(publisher.address) as channel:
        stub = pb_grpc.WeightSyncStub(channel)  # type: ignore[no-untyped-call]
        call = stub.Fetch(pb.FetchRequest(job_id="job-1", version=pb.Version(lineage=1, n=0)), timeout=60)
        assert next(call).manifest.digest == snapshots[0].digest
        started = time.monotonic()
        for snapshot in snapshots[1:]:  # keep=3: version 0 goes
            publisher.publish(snapshot)
        assert time.monotonic() - started < 10.0  # of the 60 that the transfer has
        payload = b"".join(reply.chunk.data for reply in call)
    assert payload == b"".join(bytes(data) for data in snapshots[0].data)


def test_a_version_is_never_published_twice(publisher: WeightServer, make_snapshot: MakeSnapshot) -> None:
    publisher.publish(make_snapshot(1))
    for older in (make_snapshot(1), make_snapshot(0)):
        with pytest.raises(WeightSyncError, match="is not newer than"):
            publisher.publish(older)
    assert publisher.current is make_snapshot(1)


@pytest.mark.parametrize(
    ("job_id", "version", "message"),
    [("job-1", 7, r"NOT_FOUND: version \(1, 7\)"), ("job-2", 0, "NOT_FOUND: job 'job-2' is not here")],
)
def test_an_unknown_version_or_job_is_refused_by_name(
    publisher: WeightServer, receive: Receive, make_snapshot: MakeSnapshot, job_id: str, version: int, message: str
) -> None:
    publisher.publish(make_snapshot(0))
    with pytest.raises(WeightSyncError, match=message):
        receive(publisher.address, job_id=job_id).fetch(1, version)
