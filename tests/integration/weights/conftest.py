"""A real gRPC server and real receivers on the loopback interface, and snapshots of a few megabytes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import numpy as np
import pytest

from services.common.pb import weight_sync_pb2 as pb
from services.common.weight_sync.server import WeightServer, WeightService, start_server
from services.common.weight_sync.staging import Stage
from services.common.weight_sync.store import WeightStore
from services.common.weights.snapshot import Snapshot, UInt8Array
from services.rollout.weights import fetch
from services.rollout.weights.client import WeightReceiver

Tamper = Callable[[pb.FetchRequest, Iterator[pb.FetchReply]], Iterator[pb.FetchReply]]
Receive = Callable[..., WeightReceiver]
MakeSnapshot = Callable[..., Snapshot]

SHAPES = {
    "model.embed.weight": ("bfloat16", (1000, 640)),
    "model.empty": ("float32", (0, 3)),
    "model.layers.0.weight": ("bfloat16", (999, 333)),
    "model.scale": ("float16", ()),
    "lm_head.weight": ("float32", (500, 1001)),
}


def make_snapshot(n: int, lineage: int = 1, changed: float = 0.02) -> Snapshot:
    """Version n: random weights, of which this share of the elements moved with every version since 0."""
    rng = np.random.default_rng(0)
    tensors: dict[str, tuple[str, tuple[int, ...], UInt8Array]] = {}
    for name, (dtype, shape) in SHAPES.items():
        data = rng.integers(0, 256, int(np.prod(shape)) * (4 if dtype == "float32" else 2), np.uint8)
        tensors[name] = (dtype, shape, data)
    for step in range(1, n + 1):
        steps = np.random.default_rng((lineage, step))
        for _, _, data in tensors.values():
            touched = steps.random(data.size) < changed / 2  # the low byte of an element
            data[touched] ^= 1
    return Snapshot.build(lineage, n, tensors)


@pytest.fixture(name="make_snapshot")
def make_snapshot_fixture() -> MakeSnapshot:
    return functools.lru_cache(make_snapshot)


@pytest.fixture
def reports() -> list[pb.ReportRequest]:
    """What the servers have reported to `publisher`."""
    return []


@pytest.fixture
def publisher(reports: list[pb.ReportRequest]) -> Iterator[WeightServer]:
    with WeightServer("job-1", "127.0.0.1", 0, None, on_report=reports.append) as serving:
        yield serving


@pytest.fixture
def receive(tmp_path: Path) -> Iterator[Receive]:
    """Makes receivers, each with a stage of its own: `receive(address, "r0")`."""
    with ExitStack() as cleanup:

        def make(address: str, server: str = "r0", job_id: str = "job-1", token: str | None = None) -> WeightReceiver:
            stage = Stage(tmp_path / server)
            cleanup.callback(stage.close)
            receiver = WeightReceiver(address, job_id, server, stage, token)
            cleanup.callback(receiver.close)
            return receiver

        yield make


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "_BACKOFF_S", 0.005)


class TamperingService(WeightService):
    """A server whose Fetch streams go through `tamper`, and that notes what it was asked."""

    def __init__(self, store: WeightStore) -> None:
        super().__init__("job-1", store, self._ignore)
        self.store = store
        self.tamper: Tamper = lambda _request, replies: replies
        self.requests: list[pb.FetchRequest] = []
        self.address = ""
        self.server: grpc.Server | None = None

    def Fetch(self, request: pb.FetchRequest, context: object) -> Iterator[pb.FetchReply]:  # noqa: N802
        self.requests.append(request)
        yield from self.tamper(request, super().Fetch(request, context))  # type: ignore[arg-type]

    def _ignore(self, _report: pb.ReportRequest) -> None:
        pass


@pytest.fixture
def tampering() -> Iterator[TamperingService]:
    service = TamperingService(WeightStore(3))
    server, port = start_server(service, "127.0.0.1", 0, None)
    service.address = f"127.0.0.1:{port}"
    service.server = server
    yield service
    service.store.close()
    server.stop(0.5).wait(5)
