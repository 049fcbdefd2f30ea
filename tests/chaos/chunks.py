"""Weight chunks flipped, dropped, reordered, repeated, cut short: nothing of a version is visible unless the whole of it is right.

Runs the learner's gRPC server and a rollout server's receiver, or a whole stack; between them the stream of chunks is tampered with.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from services.common.errors import WeightSyncError
from services.common.pb import weight_sync_pb2 as pb
from services.common.weight_sync import store as store_module
from services.common.weight_sync.server import WeightService, start_server
from services.common.weight_sync.staging import Stage
from services.common.weight_sync.store import WeightStore
from services.common.weights.snapshot import Snapshot, UInt8Array
from services.common.weights.tensor_file import map_tensors
from services.rollout.weights import fetch
from services.rollout.weights.client import WeightReceiver
from tests.chaos.campaign import campaign
from tests.chaos.faults import Options
from tests.chaos.result import Result
from tests.chaos.tamper import TAMPER, Replies, Tamperer, counts

CHUNK_BYTES = 16 * 1024
TENSORS = {"model.embed_tokens.weight": (400, 128), "model.norm.weight": (128,), "lm_head.weight": (400, 128)}


class TamperingService(WeightService):
    """A server that sends a share of its chunks wrongly."""

    def __init__(self, store: WeightStore, seed: int) -> None:
        super().__init__("job-1", store, lambda _report: None)
        self.tamperer = Tamperer(seed)

    def Fetch(self, request: pb.FetchRequest, context: Any) -> Replies:  # noqa: N802
        yield from self.tamperer.spoil(super().Fetch(request, context))


def chunks(options: Options) -> Result:
    """Fetches version after version until `count` chunks were tampered with; target `job`: while a job runs, whose tokens are checked."""
    return in_a_job(options) if options.target == "job" else fetched(options)


def in_a_job(options: Options) -> Result:
    """A job of which every version is sent so: the oracle finds any token that other weights sampled than those of the version it names."""
    environment = {TAMPER: str(options.seed)}
    with campaign(
        options.home, "weight chunks tampered with in a job", options.seed, environment=environment
    ) as running:
        while (found := counts(running.stack.folder)).total() < options.count:
            running.trial(lambda: None)
        running.result.count = found.total()
        running.result.extra["ways"] = dict(sorted(found.items()))
        running.finish()
    return running.result


def fetched(options: Options) -> Result:
    """The learner's server, a rollout server's receiver, and what lies in its stage."""
    started = time.monotonic()
    result = Result("weight chunks flipped, dropped, reordered, repeated", 0, options.seed)
    store_names, download_names = vars(store_module), vars(fetch)
    before = store_names["CHUNK_BYTES"], download_names["_BACKOFF_S"]
    store_names["CHUNK_BYTES"], download_names["_BACKOFF_S"] = CHUNK_BYTES, 0.001
    store = WeightStore(3)
    service = TamperingService(store, options.seed)
    server, port = start_server(service, "127.0.0.1", 0, None)
    stage = Stage(options.home / "stage")
    receiver = WeightReceiver(f"127.0.0.1:{port}", "job-1", "rollout-0", stage)
    rng, staged, refused, version = np.random.default_rng(options.seed), 0, 0, 0
    try:
        while sum(service.tamperer.counts.values()) < options.count:
            snapshot = _snapshot(version, rng)
            store.put(snapshot)
            try:
                path = receiver.fetch(1, version).path
            except WeightSyncError:
                refused += 1
            else:
                staged += 1
                result.violations += _differences(snapshot, map_tensors(path))
            version += 1
    finally:
        receiver.close()
        store.close()
        server.stop(0.5).wait(5.0)
        stage.close()
        store_names["CHUNK_BYTES"], download_names["_BACKOFF_S"] = before
    result.count = sum(service.tamperer.counts.values())
    result.extra = {
        "ways": dict(sorted(service.tamperer.counts.items())),
        "versions_staged": staged,
        "versions_refused": refused,
    }
    result.seconds = time.monotonic() - started
    return result


def _snapshot(version: int, rng: np.random.Generator) -> Snapshot:
    """Random weights; every other version is sent as a delta of the one before where the receiver has it."""
    tensors: dict[str, tuple[str, tuple[int, ...], UInt8Array]] = {}
    for name, shape in TENSORS.items():
        values = rng.standard_normal(shape).astype(np.float32)
        tensors[name] = ("float32", shape, values.reshape(-1).view(np.uint8))
    return Snapshot.build(1, version, tensors)


def _differences(snapshot: Snapshot, got: dict[str, UInt8Array]) -> list[str]:
    wrong = [
        spec.name
        for spec, data in zip(snapshot.tensors, snapshot.data, strict=True)
        if not np.array_equal(got[spec.name], data)
    ]
    return [f"version {snapshot.n} was staged with wrong bytes in {', '.join(wrong)}"] if wrong else []
