"""Rollout servers on many hosts: a version leaves the learner a few times, and goes from server to server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.common.pb import weight_sync_pb2 as pb
from services.common.weight_sync import egress
from services.common.weight_sync.server import WeightServer, WeightService
from services.common.weight_sync.staging import Stage
from services.common.weights.snapshot import Snapshot
from services.common.weights.tensor_file import map_tensors
from services.rollout.weights.client import WeightReceiver
from services.rollout.weights.relaying import Relaying

MakeSnapshot = Callable[..., Snapshot]
DIRECT = 2


class Sent:
    """Chunk bytes that each weight server of this process has sent, by its job's service."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.fetches: dict[int, int] = {}

    def count(self, service: WeightService) -> None:
        with self._lock:
            self.fetches[id(service)] = self.fetches.get(id(service), 0) + 1


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    """Counts the streams with chunks."""
    found, fetch = Sent(), WeightService.Fetch

    def counted(service: WeightService, request: pb.FetchRequest, context: Any) -> Iterator[pb.FetchReply]:
        counts = False
        for reply in fetch(service, request, context):
            if reply.WhichOneof("part") == "chunk" and not counts:
                counts = True
                found.count(service)
            yield reply

    monkeypatch.setattr(WeightService, "Fetch", counted)
    return found


@pytest.fixture
def learner(sent: Sent, monkeypatch: pytest.MonkeyPatch) -> Iterator[WeightServer]:
    del sent  # before the server is made
    monkeypatch.setattr(egress.Egress.__init__, "__defaults__", (DIRECT, 2))
    with WeightServer("job-1", "127.0.0.1", 0, None) as serving:
        yield serving


class Server:
    """The weights' part of a rollout server."""

    def __init__(self, address: str, name: str, folder: Path) -> None:
        self.stage, self.relay = Stage(folder / name), Relaying("job-1", "127.0.0.1", None, None)
        self.receiver = WeightReceiver(address, "job-1", name, self.stage, None, self.relay)

    def close(self) -> None:
        self.receiver.close()
        self.relay.close()
        self.stage.close()


@pytest.fixture
def server_of(tmp_path: Path) -> Iterator[Callable[[str, str], Server]]:
    with ExitStack() as cleanup:

        def make(address: str, name: str) -> Server:
            made = Server(address, name, tmp_path)
            cleanup.callback(made.close)
            return made

        yield make


def takes(server: Server, snapshot: Snapshot) -> bool:
    """Fetches the version and reports it, as a server does; whether every byte is right."""
    staged = server.receiver.fetch(snapshot.lineage, snapshot.n)
    tensors = map_tensors(staged.path)
    server.receiver.report(snapshot.lineage, snapshot.n)
    return all(np.array_equal(tensors[s.name], d) for s, d in zip(snapshot.tensors, snapshot.data, strict=True))


def test_however_many_servers_there_are_the_learner_sends_a_version_a_few_times(
    learner: WeightServer, server_of: Callable[[str, str], Server], sent: Sent, make_snapshot: MakeSnapshot
) -> None:
    servers = [server_of(learner.address, f"r{i}") for i in range(12)]
    for n in range(3):
        learner.publish(make_snapshot(n))
        before = sum(sent.fetches.values())
        own = sent.fetches.get(id(learner.service), 0)
        with ThreadPoolExecutor(len(servers)) as threads:
            assert all(threads.map(lambda server: takes(server, make_snapshot(n)), servers))  # noqa: B023
        assert sent.fetches[id(learner.service)] - own <= DIRECT
        assert sum(sent.fetches.values()) - before == len(servers)


def test_a_relay_that_is_gone_means_the_learner(
    learner: WeightServer, server_of: Callable[[str, str], Server], make_snapshot: MakeSnapshot
) -> None:
    learner.publish(make_snapshot(0))
    first, second, third = (server_of(learner.address, f"r{i}") for i in range(3))
    assert takes(first, make_snapshot(0))
    address = first.relay.address
    first.relay.close()
    learner.service.egress.reported("r0", address, make_snapshot(0).version, failed=False)
    assert takes(second, make_snapshot(0))
    assert takes(third, make_snapshot(0))


def test_what_a_relay_has_changed_is_not_taken(
    learner: WeightServer, server_of: Callable[[str, str], Server], make_snapshot: MakeSnapshot
) -> None:
    learner.publish(make_snapshot(0))
    with WeightServer("job-1", "127.0.0.1", 0, None) as other:
        other.publish(Snapshot.build(1, 0, {
            spec.name: (spec.dtype, spec.shape, np.zeros_like(data))
            for spec, data in zip(make_snapshot(0).tensors, make_snapshot(0).data, strict=True)
        }))  # fmt: skip
        learner.service.egress.reported("r0", other.address, make_snapshot(0).version, failed=False)
        assert takes(server_of(learner.address, "r1"), make_snapshot(0))
