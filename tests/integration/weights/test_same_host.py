"""A learner and a rollout server on one host: the version's file is taken as it is, and otherwise its bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from services.common.weight_sync import server
from services.common.weight_sync.server import WeightServer
from services.common.weight_sync.staging import Stage, StagedWeights
from services.common.weights.snapshot import PolicyVersion, Snapshot
from services.common.weights.tensor_file import map_snapshot, map_tensors
from services.rollout.weights.client import WeightReceiver

Receive = Callable[..., WeightReceiver]
MakeSnapshot = Callable[..., Snapshot]
Publish = Callable[[int], Path]


@pytest.fixture
def publish(tmp_path: Path, publisher: WeightServer, make_snapshot: MakeSnapshot) -> Iterator[Publish]:
    """Publishes a version from a file, as the learner does; gives the path."""
    stage = Stage(tmp_path / "learner", keep=3)

    def make(n: int) -> Path:
        snapshot = make_snapshot(n)
        with stage.begin(1, n, snapshot.tensors) as writer:
            for spec, data in zip(snapshot.tensors, snapshot.data, strict=True):
                writer.write(spec.name, 0, data.data)
            path = writer.commit(fetch_s=0.0, wire_bytes=0).path
        publisher.publish(map_snapshot(path, PolicyVersion(1, n)))
        return path

    yield make
    stage.close()


def holds(staged: StagedWeights, snapshot: Snapshot) -> bool:
    tensors = map_tensors(staged.path)
    return all(np.array_equal(tensors[s.name], d) for s, d in zip(snapshot.tensors, snapshot.data, strict=True))


def test_the_file_itself_is_taken_and_no_byte_sent(
    publish: Publish, publisher: WeightServer, receive: Receive, make_snapshot: MakeSnapshot
) -> None:
    receiver = receive(publisher.address)
    for n in range(3):
        path = publish(n)
        staged = receiver.fetch(1, n)
        assert staged.path.stat().st_ino == path.stat().st_ino
        assert (staged.wire_bytes, staged.total_bytes) == (0, make_snapshot(n).total_bytes)
        assert staged.digests == {spec.name: spec.digest.hex() for spec in make_snapshot(n).tensors}


def test_it_stays_when_the_learner_removes_its_own(
    publish: Publish, publisher: WeightServer, receive: Receive, make_snapshot: MakeSnapshot
) -> None:
    path = publish(0)
    staged = receive(publisher.address).fetch(1, 0)
    path.unlink()
    assert holds(staged, make_snapshot(0))


def test_on_another_host_the_bytes_are_sent(
    publish: Publish,
    publisher: WeightServer,
    receive: Receive,
    make_snapshot: MakeSnapshot,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "boot_id", lambda: "of another host")
    publish(0)
    staged = receive(publisher.address).fetch(1, 0)
    assert staged.wire_bytes == staged.total_bytes
    assert holds(staged, make_snapshot(0))


def test_in_a_container_that_does_not_see_the_files_the_bytes_are_sent_and_no_file_is_asked_for_again(
    publish: Publish, publisher: WeightServer, receive: Receive, make_snapshot: MakeSnapshot
) -> None:
    receiver = receive(publisher.address)
    publish(0).unlink()
    staged = receiver.fetch(1, 0)
    assert staged.wire_bytes == staged.total_bytes
    assert holds(staged, make_snapshot(0))
    publish(1)
    assert 0 < receiver.fetch(1, 1).wire_bytes < staged.wire_bytes, "a delta"


def test_a_file_with_a_wrong_bit_is_never_staged(
    publish: Publish, publisher: WeightServer, receive: Receive, make_snapshot: MakeSnapshot, tmp_path: Path
) -> None:
    path = publish(0)
    whole = path.read_bytes()
    wrong = tmp_path / "wrong"
    wrong.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    wrong.replace(path)  # the server has the right bytes mapped
    staged = receive(publisher.address).fetch(1, 0)
    assert staged.wire_bytes == staged.total_bytes
    assert holds(staged, make_snapshot(0))
    assert len(list(staged.path.parent.iterdir())) == 1
