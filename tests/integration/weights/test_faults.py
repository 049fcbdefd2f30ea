"""Whatever happens on the wire, nothing wrong becomes visible, and what can be mended is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from services.common.errors import WeightSyncError
from services.common.pb import weight_sync_pb2 as pb
from services.common.pb import weight_sync_pb2_grpc as pb_grpc
from services.common.weight_sync import store as store_module
from services.common.weight_sync.server import WeightServer
from services.common.weight_sync.staging import StagedWeights
from services.common.weights.snapshot import Snapshot, chunk_checksum
from services.common.weights.tensor_file import map_tensors
from services.rollout.weights.client import WeightReceiver

Receive = Callable[..., WeightReceiver]
MakeSnapshot = Callable[..., Snapshot]
Replies = Iterator[pb.FetchReply]

pytestmark = pytest.mark.usefixtures("quick_retries")

MIB = 1 << 20
AT = 2 * MIB  # the chunk that things happen to: the third of four


def is_at(reply: pb.FetchReply) -> bool:
    return reply.WhichOneof("part") == "chunk" and reply.chunk.offset == AT


def flip(replies: Replies) -> Replies:
    for reply in replies:
        if is_at(reply):
            data = bytearray(reply.chunk.data)
            data[77] ^= 4
            reply.chunk.data = bytes(data)
        yield reply


def drop(replies: Replies) -> Replies:
    return (reply for reply in replies if not is_at(reply))


def repeat(replies: Replies) -> Replies:
    for reply in replies:
        yield from [reply, reply] if is_at(reply) else [reply]


def reorder(replies: Replies) -> Replies:
    for reply in replies:
        if is_at(reply):
            yield next(replies)
        yield reply


def shorten(replies: Replies) -> Replies:
    for reply in replies:
        if is_at(reply):
            reply.chunk.data = reply.chunk.data[:-1]
        yield reply


def end_early(replies: Replies) -> Replies:
    for reply in replies:
        if is_at(reply):
            return
        yield reply


def die(replies: Replies) -> Replies:
    for reply in replies:
        if is_at(reply):
            raise ConnectionError("the server's handler dies")
        yield reply


def send_nothing(replies: Replies) -> Replies:
    for reply in replies:
        if is_at(reply):
            yield pb.FetchReply(chunk=pb.Chunk(offset=AT, data=b"", checksum=chunk_checksum(b"")))
        yield reply


def second_manifest(replies: Replies) -> Replies:
    first = next(replies)
    yield first
    for reply in replies:
        if is_at(reply):
            yield first
        yield reply


def beyond_the_end(replies: Replies) -> Replies:
    for reply in replies:
        if is_at(reply):
            data = bytes(3 * MIB)
            yield pb.FetchReply(chunk=pb.Chunk(offset=AT, data=data, checksum=chunk_checksum(data)))
        else:
            yield reply


LASTING = [flip, drop, reorder, shorten, end_early, die, send_nothing, second_manifest, beyond_the_end]


def visible(receiver: WeightReceiver) -> list[str]:
    return [path.name for path in receiver._stage.directory.iterdir()]


def assert_bit_equal(staged: StagedWeights, snapshot: Snapshot) -> None:
    mapped = map_tensors(staged.path)
    for spec, data in zip(snapshot.tensors, snapshot.data, strict=True):
        np.testing.assert_array_equal(mapped[spec.name], data)


def spoil(replies: Replies, at: int = 0) -> Replies:
    """Wrong bytes under a right checksum: the server itself is wrong, or the base is."""
    for reply in replies:
        if reply.WhichOneof("part") == "chunk" and reply.chunk.offset == at:
            data = bytearray(reply.chunk.data)
            data[len(data) // 2] ^= 1
            reply.chunk.data, reply.chunk.checksum = bytes(data), chunk_checksum(bytes(data))
        yield reply


@pytest.mark.parametrize("tamper", LASTING)
def test_a_fault_that_stays_ends_the_fetch_at_its_offset_and_nothing_is_visible(
    tampering: Any, receive: Receive, make_snapshot: MakeSnapshot, tamper: Callable[[Replies], Replies]
) -> None:
    tampering.store.put(make_snapshot(0))
    tampering.tamper = lambda _request, replies: tamper(replies)
    receiver = receive(tampering.address)
    with pytest.raises(
        WeightSyncError, match=rf"version \(1, 0\): gave up at offset {AT} \(5 tries without progress\)"
    ):
        receiver.fetch(1, 0)
    assert visible(receiver) == []
    assert [request.offset for request in tampering.requests] == [0, AT, AT, AT, AT]


@pytest.mark.parametrize("tamper", [*LASTING, repeat])
def test_a_fault_that_passes_is_mended_from_the_last_good_byte(
    tampering: Any, receive: Receive, make_snapshot: MakeSnapshot, tamper: Callable[[Replies], Replies]
) -> None:
    tampering.store.put(make_snapshot(0))
    tampering.tamper = lambda _request, replies: tamper(replies) if len(tampering.requests) == 1 else replies
    receiver = receive(tampering.address)
    assert_bit_equal(receiver.fetch(1, 0), make_snapshot(0))
    resumed_at = AT + MIB if tamper is repeat else AT
    assert [request.offset for request in tampering.requests] == [0, resumed_at]
    assert len(visible(receiver)) == 1


def test_wrong_bytes_under_right_checksums_name_the_tensor(
    tampering: Any, receive: Receive, make_snapshot: MakeSnapshot
) -> None:
    tampering.store.put(make_snapshot(0))
    tampering.tamper = lambda _request, replies: spoil(replies, at=3 * MIB)
    receiver = receive(tampering.address)
    with pytest.raises(WeightSyncError, match=r"lm_head\.weight: the bytes do not match their digest \(offset \d+\)"):
        receiver.fetch(1, 0)
    assert visible(receiver) == []


def test_a_wrong_delta_is_noticed_and_the_version_fetched_whole(
    tampering: Any, receive: Receive, make_snapshot: MakeSnapshot
) -> None:
    receiver = receive(tampering.address)
    for n in range(2):
        tampering.store.put(make_snapshot(n))
    receiver.fetch(1, 0)
    tampering.tamper = lambda request, replies: spoil(replies) if request.HasField("base") else replies
    staged = receiver.fetch(1, 1)
    assert_bit_equal(staged, make_snapshot(1))
    assert [request.HasField("base") for request in tampering.requests] == [False, True, False]


@pytest.mark.parametrize("damage", ["a bit", "the end", "all"])
def test_a_damaged_base_is_noticed_and_the_version_fetched_whole(
    tampering: Any, receive: Receive, make_snapshot: MakeSnapshot, damage: str
) -> None:
    receiver = receive(tampering.address)
    for n in range(2):
        tampering.store.put(make_snapshot(n))
    path = receiver.fetch(1, 0).path
    content = bytearray(path.read_bytes())
    content[-1] ^= 128
    path.write_bytes({"a bit": bytes(content), "the end": bytes(content[:-5]), "all": b""}[damage])
    assert_bit_equal(receiver.fetch(1, 1), make_snapshot(1))
    assert not tampering.requests[-1].HasField("base")


def test_a_delta_resumes_by_offset(
    tampering: Any, receive: Receive, make_snapshot: MakeSnapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "CHUNK_BYTES", 10_000)
    receiver = receive(tampering.address)
    for n in range(2):
        tampering.store.put(make_snapshot(n))
    receiver.fetch(1, 0)

    def first_three(request: pb.FetchRequest, replies: Replies) -> Replies:
        return (reply for index, reply in enumerate(replies) if request.offset or index <= 3)

    tampering.tamper = first_three
    staged = receiver.fetch(1, 1)
    assert_bit_equal(staged, make_snapshot(1))
    assert [request.offset for request in tampering.requests] == [0, 0, 30_000]
    assert all(request.HasField("base") for request in tampering.requests[1:])


def test_a_base_that_goes_during_the_transfer_means_starting_again_in_full(
    tampering: Any, receive: Receive, make_snapshot: MakeSnapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "CHUNK_BYTES", 10_000)
    receiver = receive(tampering.address)
    for n in range(3):
        tampering.store.put(make_snapshot(n))
    receiver.fetch(1, 0)

    def lose_the_base(_request: pb.FetchRequest, replies: Replies) -> Replies:
        if len(tampering.requests) > 2:
            yield from replies
            return
        for index, reply in enumerate(replies):
            yield reply
            if index == 3:
                tampering.store.put(make_snapshot(3))
                return

    tampering.tamper = lose_the_base
    staged = receiver.fetch(1, 1)
    assert_bit_equal(staged, make_snapshot(1))
    assert [request.offset for request in tampering.requests] == [0, 0, 30_000, 0]


Alter = Callable[[pb.Manifest], object]
ALTERATIONS: dict[str, Alter] = {
    "version": lambda manifest: setattr(manifest.version, "n", 1),
    "digest": lambda manifest: setattr(manifest, "digest", bytes(16)),
    "name": lambda manifest: setattr(manifest.tensors[0], "name", "model.other.weight"),
    "dtype": lambda manifest: setattr(manifest.tensors[0], "dtype", "float16"),
    "unknown dtype": lambda manifest: setattr(manifest.tensors[0], "dtype", "int4"),
    "shape": lambda manifest: manifest.tensors[0].shape.reverse(),
    "wire bytes": lambda manifest: setattr(manifest.tensors[0], "wire_bytes", 7),
    "tensor digest": lambda manifest: setattr(manifest.tensors[0], "digest", b"short"),
    "a tensor less": lambda manifest: manifest.tensors.pop(0),
    "no tensors": lambda manifest: manifest.ClearField("tensors"),
    "base": lambda manifest: setattr(manifest, "encoding", pb.ENCODING_XOR_ZSTD),
    "encoding": lambda manifest: setattr(manifest, "encoding", pb.ENCODING_UNSPECIFIED),
}


@pytest.mark.parametrize("alter", ALTERATIONS.values(), ids=ALTERATIONS)
def test_a_manifest_that_was_altered_anywhere_is_refused(
    tampering: Any, receive: Receive, make_snapshot: MakeSnapshot, alter: Alter
) -> None:
    def altered(_request: pb.FetchRequest, replies: Replies) -> Replies:
        for reply in replies:
            if reply.HasField("manifest"):
                changed = pb.Manifest.FromString(reply.manifest.SerializeToString())
                alter(changed)
                yield pb.FetchReply(manifest=changed)
            else:
                yield reply

    tampering.store.put(make_snapshot(0))
    tampering.tamper = altered
    receiver = receive(tampering.address)
    with pytest.raises(WeightSyncError, match=r"version \(1, 0\): "):
        receiver.fetch(1, 0)
    assert visible(receiver) == []


def test_tensors_that_change_their_shape_within_a_job_are_refused(
    publisher: WeightServer, receive: Receive, make_snapshot: MakeSnapshot
) -> None:
    receiver = receive(publisher.address)
    publisher.publish(make_snapshot(0))
    kept = receiver.fetch(1, 0)
    other = {
        spec.name: (spec.dtype, spec.shape[::-1], data)
        for spec, data in zip(make_snapshot(0).tensors, make_snapshot(0).data, strict=True)
    }
    publisher.publish(Snapshot.build(1, 1, other))
    with pytest.raises(WeightSyncError, match=r"model\.embed\.weight bfloat16 \(640, 1000\) came where"):
        receiver.fetch(1, 1)
    assert visible(receiver) == [kept.path.name]


def test_a_server_that_is_killed_and_comes_back_is_resumed(
    receive: Receive, make_snapshot: MakeSnapshot, tampering: Any
) -> None:
    tampering.store.put(make_snapshot(0))
    stuck, go_on = threading.Event(), threading.Event()

    def stop_after_two(_request: pb.FetchRequest, replies: Replies) -> Replies:
        for reply in replies:
            if is_at(reply):
                stuck.set()
                go_on.wait(20)
                return
            yield reply

    tampering.tamper = stop_after_two
    receiver = receive(tampering.address)
    done: list[StagedWeights] = []
    fetching = threading.Thread(target=lambda: done.append(receiver.fetch(1, 0)))
    fetching.start()
    assert stuck.wait(20)
    port = int(tampering.address.rpartition(":")[2])
    tampering.server.stop(0).wait(10)
    go_on.set()
    with WeightServer("job-1", "127.0.0.1", port, None) as again:
        again.publish(make_snapshot(0))
        fetching.join(30)
    assert_bit_equal(done[0], make_snapshot(0))
    assert done[0].wire_bytes == done[0].total_bytes, "nothing travelled twice"


@pytest.mark.parametrize(("ending", "why"), [("deadline", "deadline"), ("close", "the receiver was closed")])
def test_a_server_that_says_nothing_cannot_hold_a_fetch(
    tampering: Any, receive: Receive, make_snapshot: MakeSnapshot, ending: str, why: str
) -> None:
    tampering.store.put(make_snapshot(0))
    release = threading.Event()

    def silent(_request: pb.FetchRequest, replies: Replies) -> Replies:
        release.wait(20)
        return replies

    tampering.tamper = silent
    receiver = receive(tampering.address)
    if ending == "close":
        threading.Timer(0.5, receiver.close).start()
    started = time.monotonic()
    try:
        with pytest.raises(WeightSyncError, match=rf"gave up at offset 0 \({why}\)"):
            receiver.fetch(1, 0, deadline_s=1.0 if ending == "deadline" else 60.0)
        assert time.monotonic() - started < 10
    finally:
        release.set()
    assert visible(receiver) == []


@pytest.mark.parametrize(
    ("offset", "timeout_s", "code"),
    [
        (1 << 40, 10.0, grpc.StatusCode.OUT_OF_RANGE),
        (0, None, grpc.StatusCode.INVALID_ARGUMENT),
        (0, 1e6, grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
def test_the_server_refuses_offsets_beyond_the_end_and_calls_without_a_deadline(
    publisher: WeightServer, make_snapshot: MakeSnapshot, offset: int, timeout_s: float | None, code: grpc.StatusCode
) -> None:
    publisher.publish(make_snapshot(0))
    with grpc.insecure_channel(publisher.address) as channel:
        stub = pb_grpc.WeightSyncStub(channel)  # type: ignore[no-untyped-call]
        request = pb.FetchRequest(job_id="job-1", version=pb.Version(lineage=1, n=0), offset=offset)
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Fetch(request, timeout=timeout_s))
    assert caught.value.code() is code
