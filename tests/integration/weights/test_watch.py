"""Announcements, reports, tokens, and what stopping ends."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from services.common.errors import ConfigError, WeightSyncError
from services.common.pb import weight_sync_pb2 as pb
from services.common.pb import weight_sync_pb2_grpc as pb_grpc
from services.common.weight_sync import server
from services.common.weight_sync.server import WeightServer
from services.common.weight_sync.store import News, Payload, WeightStore
from services.common.weights.snapshot import Snapshot
from services.rollout.weights.client import WeightReceiver

Receive = Callable[..., WeightReceiver]
MakeSnapshot = Callable[..., Snapshot]

SECRET = "s3cret"  # noqa: S105


def tiny(n: int, lineage: int = 1) -> Snapshot:
    return Snapshot.build(lineage, n, {"w": ("float32", (2,), np.full(8, n % 256, np.uint8))})


async def test_a_watcher_hears_the_current_version_at_once_and_then_newer_ones(
    publisher: WeightServer, receive: Receive
) -> None:
    publisher.publish(tiny(3))
    heard = receive(publisher.address).watch()
    async with asyncio.timeout(10):
        assert (await anext(heard)).version == (1, 3)
        for version in [(1, 4), (2, 4), (2, 5)]:
            publisher.publish(tiny(version[1], version[0]))
            assert (await anext(heard)).version == version
    await heard.aclose()  # type: ignore[attr-defined]


async def test_a_watcher_that_comes_before_the_first_version_waits_for_it(
    publisher: WeightServer, receive: Receive
) -> None:
    heard = receive(publisher.address).watch()
    waiting = asyncio.ensure_future(anext(heard))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    publisher.publish(tiny(0))
    assert (await asyncio.wait_for(waiting, 10)).version == (1, 0)


def test_a_watcher_that_leaves_wakes_no_other(publisher: WeightServer, monkeypatch: pytest.MonkeyPatch) -> None:
    count, waits, wait = 40, list[None](), WeightStore.news_after

    def counted(store: WeightStore, *args: Any) -> News | None:
        waits.append(None)
        return wait(store, *args)

    monkeypatch.setattr(WeightStore, "news_after", counted)
    with grpc.insecure_channel(publisher.address) as channel:
        stub = pb_grpc.WeightSyncStub(channel)  # type: ignore[no-untyped-call]  # generated code
        calls = [stub.Watch(pb.WatchRequest(job_id="job-1", server=f"r{i}"), timeout=30) for i in range(count)]
        while len(waits) < count:
            time.sleep(0.05)
        before = len(waits)
        for call in calls[: count // 2]:
            call.cancel()
            time.sleep(0.02)
    assert len(waits) - before <= 2 * count  # at their own polls, one a second


def test_a_version_s_manifest_is_made_once_for_all_servers(
    publisher: WeightServer, receive: Receive, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[Snapshot] = []
    full = Payload.full

    def noted(snapshot: Snapshot) -> Payload:
        made.append(snapshot)
        return full(snapshot)

    monkeypatch.setattr(Payload, "full", noted)
    publisher.publish(dataclasses.replace(tiny(1), path=tmp_path / "nowhere"))
    for name in ("r0", "r1", "r2"):
        receive(publisher.address, name).fetch(1, 1)
    assert len(made) == 1


async def test_a_slow_watcher_gets_the_newest_and_skips_what_it_missed(
    publisher: WeightServer, receive: Receive
) -> None:
    publisher.publish(tiny(0))
    heard = receive(publisher.address).watch()
    async with asyncio.timeout(10):
        assert (await anext(heard)).version == (1, 0)
        for n in range(1, 200):
            publisher.publish(tiny(n))
        await asyncio.sleep(0.5)
        assert (await anext(heard)).version == (1, 199)


async def test_a_watcher_finds_a_learner_that_came_back(receive: Receive) -> None:
    first = WeightServer("job-1", "127.0.0.1", 0, None)
    first.publish(tiny(1))
    heard = receive(first.address).watch()
    async with asyncio.timeout(30):
        assert (await anext(heard)).version == (1, 1)
        await asyncio.to_thread(first.stop)
        second = WeightServer("job-1", "127.0.0.1", first.port, None)
        try:
            second.publish(tiny(1, lineage=2))
            assert (await anext(heard)).version == (2, 1)
        finally:
            await heard.aclose()  # type: ignore[attr-defined]
            second.stop()


async def test_a_learner_that_stays_away_ends_the_watch_with_its_name(
    publisher: WeightServer, receive: Receive
) -> None:
    publisher.publish(tiny(1))
    heard = receive(publisher.address).watch(unreachable_s=0.5)
    async with asyncio.timeout(20):
        assert (await anext(heard)).version == (1, 1)
        await asyncio.to_thread(publisher.stop)
        with pytest.raises(WeightSyncError, match=r"watching job job-1: not reachable for 0\.5 s"):
            await anext(heard)


async def test_closing_the_receiver_ends_its_watch(publisher: WeightServer, receive: Receive) -> None:
    receiver = receive(publisher.address)
    waiting = asyncio.ensure_future(anext(receiver.watch(), "ended"))
    await asyncio.sleep(0.3)
    receiver.close()
    assert await asyncio.wait_for(waiting, 5) == "ended"


def test_stopping_the_server_ends_every_watcher_and_frees_the_port() -> None:
    publisher = WeightServer("job-1", "127.0.0.1", 0, None)
    publisher.publish(tiny(0))
    watching, ended = threading.Semaphore(0), []
    with grpc.insecure_channel(publisher.address) as channel:
        stub = pb_grpc.WeightSyncStub(channel)  # type: ignore[no-untyped-call]

        def watch(index: int) -> None:
            for _ in stub.Watch(pb.WatchRequest(job_id="job-1", server=f"r{index}"), timeout=60):
                watching.release()
            ended.append(index)

        watchers = [threading.Thread(target=watch, args=(index,)) for index in range(8)]
        for watcher in watchers:
            watcher.start()
        assert all(watching.acquire(timeout=20) for _ in watchers)
        started = time.monotonic()
        publisher.stop(30.0)
        for watcher in watchers:
            watcher.join(10)
        assert time.monotonic() - started < 10
    assert sorted(ended) == list(range(8))
    WeightServer("job-1", "127.0.0.1", publisher.port, None).stop()


def test_watchers_that_went_away_do_not_use_up_the_server(publisher: WeightServer, receive: Receive) -> None:
    publisher.publish(tiny(0))
    with grpc.insecure_channel(publisher.address) as channel:
        stub = pb_grpc.WeightSyncStub(channel)  # type: ignore[no-untyped-call]
        for _ in range(4):
            calls = [stub.Watch(pb.WatchRequest(job_id="job-1"), timeout=60) for _ in range(100)]
            for call in calls:
                assert next(call).version.n == 0
            for call in calls:
                call.cancel()
            time.sleep(1.0)
    assert receive(publisher.address).fetch(1, 0).total_bytes == 8


def test_more_watchers_than_there_is_room_for_are_refused_and_fetches_still_work(
    receive: Receive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_MAX_WATCHERS", 128)
    with WeightServer("job-1", "127.0.0.1", 0, None) as publisher:
        watched_by_too_many(publisher, receive)


def watched_by_too_many(publisher: WeightServer, receive: Receive) -> None:
    publisher.publish(tiny(0))
    codes = []
    with grpc.insecure_channel(publisher.address) as channel:
        stub = pb_grpc.WeightSyncStub(channel)  # type: ignore[no-untyped-call]
        calls = [stub.Watch(pb.WatchRequest(job_id="job-1"), timeout=60) for _ in range(140)]
        for call in calls:
            try:
                next(call)
            except grpc.RpcError as error:
                codes.append(error.code())
        assert codes == [grpc.StatusCode.RESOURCE_EXHAUSTED] * 12
        assert receive(publisher.address).fetch(1, 0).total_bytes == 8
        for call in calls:
            call.cancel()


def test_every_report_is_passed_on(publisher: WeightServer, receive: Receive, reports: list[pb.ReportRequest]) -> None:
    publisher.publish(tiny(4))
    receiver = receive(publisher.address, "r0")
    assert receiver.report(1, 3, error="engine said no") == (1, 4)
    assert receiver.report(1, 4, fetch_s=1.5, pause_s=0.25, apply_s=0.125, wire_bytes=99) == (1, 4)
    assert reports == [
        pb.ReportRequest(
            job_id="job-1", server="r0", version=pb.Version(lineage=1, n=3), error="engine said no"
        ),
        pb.ReportRequest(
            job_id="job-1", server="r0", version=pb.Version(lineage=1, n=4), fetch_seconds=1.5, pause_seconds=0.25,
            apply_seconds=0.125, wire_bytes=99,
        ),
    ]  # fmt: skip


def test_a_report_to_nobody_is_an_error_that_names_the_address(publisher: WeightServer, receive: Receive) -> None:
    receiver = receive(publisher.address)
    assert receiver.report(1, 0) is None
    publisher.stop()
    with pytest.raises(WeightSyncError, match=f"to {publisher.address}: UNAVAILABLE"):
        receiver.report(1, 0)


@pytest.mark.parametrize("token", [None, "", "wrong", "s3cre", "s3cret-and-more"])
async def test_without_the_right_token_every_call_is_refused(receive: Receive, token: str | None) -> None:
    reports: list[pb.ReportRequest] = []
    with WeightServer("job-1", "127.0.0.1", 0, SECRET, on_report=reports.append) as publisher:
        publisher.publish(tiny(0))
        receiver = receive(publisher.address, token=token)
        with pytest.raises(WeightSyncError, match="UNAUTHENTICATED: the token is missing or wrong"):
            await asyncio.to_thread(receiver.fetch, 1, 0)
        with pytest.raises(WeightSyncError, match="UNAUTHENTICATED"):
            await asyncio.to_thread(receiver.report, 1, 0)
        async with asyncio.timeout(10):
            with pytest.raises(WeightSyncError, match="UNAUTHENTICATED"):
                await anext(receiver.watch())
        assert reports == []


async def test_with_the_token_every_call_is_served(receive: Receive) -> None:
    with WeightServer("job-1", "127.0.0.1", 0, SECRET) as publisher:
        publisher.publish(tiny(0))
        receiver = receive(publisher.address, token=SECRET)
        async with asyncio.timeout(10):
            assert (await anext(receiver.watch())).version == (1, 0)
        assert (await asyncio.to_thread(receiver.fetch, 1, 0)).policy_version == 0
        assert await asyncio.to_thread(receiver.report, 1, 0) == (1, 0)


def test_a_server_beyond_loopback_needs_a_token_and_a_port_is_not_shared(publisher: WeightServer) -> None:
    with pytest.raises(ConfigError, match=r"host=0\.0\.0\.0 is not loopback"):
        WeightServer("job-1", "0.0.0.0", 0, None)  # noqa: S104
    with pytest.raises(ConfigError, match=f"127.0.0.1:{publisher.port}: the address is taken"):
        WeightServer("job-1", "127.0.0.1", publisher.port, None)
    with WeightServer("job-1", "127.0.0.1", 0, None, advertise_host="learner-0") as named:
        assert named.address == f"learner-0:{named.port}"


def test_versions_that_are_no_longer_kept_leave_the_memory(publisher: WeightServer, receive: Receive) -> None:
    receiver = receive(publisher.address)
    alive: list[weakref.ref[Any]] = []
    for n in range(10):
        snapshot = tiny(n)
        alive.append(weakref.ref(snapshot.data[0]))
        publisher.publish(snapshot)
        receiver.fetch(1, n)
        del snapshot
    gc.collect()
    assert [ref() is not None for ref in alive] == [False] * 7 + [True] * 3


@pytest.mark.parametrize("versions", [1, 3])
def test_a_receiver_takes_a_few_chunks_and_one_tensor_of_memory_not_the_model(
    publisher: WeightServer, tmp_path: Path, versions: int
) -> None:
    """96 MiB in 24 tensors: fetched in full, then by deltas."""
    rng = np.random.default_rng(0)
    tensors = {f"w{i}": ("bfloat16", (2 << 20,), rng.integers(0, 256, 4 << 20, np.uint8)) for i in range(24)}
    for n in range(versions):
        for _, _, data in tensors.values():
            data[n::100] ^= 1
        publisher.publish(Snapshot.build(1, n, tensors))
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from services.rollout.weights.client import WeightReceiver; from services.common.weight_sync.staging import Stage\n"
        "receiver = WeightReceiver(sys.argv[1], 'job-1', 'r0', Stage(Path(sys.argv[2])))\n"
        "receiver.report(1, 0); before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for n in range(int(sys.argv[3])): receiver.fetch(1, n)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    arguments = [sys.executable, "-c", code, publisher.address, str(tmp_path / "s"), str(versions)]
    done = subprocess.run(arguments, check=True, capture_output=True, text=True, timeout=120)
    grown = int(done.stdout) * 1024
    mapped_base = (
        (96 << 20) if versions > 1 else 0
    )  # pages of the base's file count as resident, and can be dropped at any time
    assert grown < mapped_base + (48 << 20)
