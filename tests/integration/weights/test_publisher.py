"""The learner's publisher: a stage, and the weights' process that serves it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

from services.common.errors import ConfigError, WeightSyncError
from services.common.service.process_tree import is_running
from services.common.weight_sync.staging import Stage, remove_abandoned
from services.common.weights.snapshot import PolicyVersion, Snapshot
from services.common.weights.tensor_file import layout, map_tensors
from services.learner.weights import publisher as module
from services.learner.weights.messages import Serve
from services.learner.weights.publisher import Publisher
from services.rollout.weights.client import WeightReceiver

Receive = Callable[..., WeightReceiver]
MakeSnapshot = Callable[..., Snapshot]


def serve_on(host: str = "127.0.0.1", token: str | None = None) -> Serve:
    return Serve(job_id="job-1", host=host, advertise_host=None, token=token, log_level="INFO")


@pytest.fixture
async def publisher(tmp_path: Path) -> AsyncIterator[Publisher]:
    made = await Publisher(Stage(tmp_path / "learner", keep=3)).start(serve_on())
    yield made
    await made.stop()


def writing(snapshot: Snapshot) -> Callable[[Path], object]:
    """What rank 0 does."""

    async def write(path: Path) -> None:
        plan = layout([(s.name, s.dtype, s.shape) for s in snapshot.tensors], {})
        with path.open("wb") as file:
            file.truncate(plan.total_bytes)
            file.write(plan.header)
            for spec, data in zip(snapshot.tensors, snapshot.data, strict=True):
                file.seek(plan.offsets[spec.name])
                file.write(data.data)

    return write


def weights_process() -> psutil.Process:
    """The publisher's process; others of this process's children are other tests'."""
    (found,) = (child for child in psutil.Process().children() if module.PROCESS_MODULE in child.cmdline())
    return found


async def published(publisher: Publisher, snapshot: Snapshot) -> None:
    await publisher.publish(snapshot.version, writing(snapshot))  # type: ignore[arg-type]


async def test_a_published_version_is_announced_with_its_digests_and_fetched_from_this_host(
    publisher: Publisher, receive: Receive, make_snapshot: MakeSnapshot
) -> None:
    assert publisher.digest == ""
    await published(publisher, make_snapshot(0))
    receiver = receive(publisher.address)
    async with asyncio.timeout(10):
        assert (await anext(receiver.watch())).version == (1, 0)
    staged = await asyncio.to_thread(receiver.fetch, 1, 0)
    tensors, expected = map_tensors(staged.path), make_snapshot(0)
    assert all(np.array_equal(tensors[s.name], d) for s, d in zip(expected.tensors, expected.data, strict=True))
    assert staged.digests == {spec.name: spec.digest.hex() for spec in expected.tensors}
    assert staged.wire_bytes == 0


async def test_the_files_of_versions_that_are_no_longer_kept_are_removed(
    publisher: Publisher, make_snapshot: MakeSnapshot, tmp_path: Path
) -> None:
    for n in range(5):
        await published(publisher, make_snapshot(n))
    assert sorted(path.name[:4] for path in (tmp_path / "learner").iterdir()) == ["v1-2", "v1-3", "v1-4"]
    await publisher.stop()
    assert not (tmp_path / "learner").exists()


async def test_reports_reach_the_head_and_those_of_servers_long_gone_are_let_go(
    publisher: Publisher, receive: Receive, make_snapshot: MakeSnapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_SERVERS", 2)
    await published(publisher, make_snapshot(0))
    for name in ("r0", "r1", "r2"):
        await asyncio.to_thread(receive(publisher.address, name).report, 1, 0, error=f"of {name}", pause_s=0.5)
    async with asyncio.timeout(10):
        while "r2" not in publisher.reports:
            await asyncio.sleep(0.01)
    assert {name: (r.version, r.error, r.pause_s) for name, r in publisher.reports.items()} == {
        name: ((1, 0), f"of {name}", 0.5) for name in ("r1", "r2")
    }


async def test_a_version_that_is_not_newer_is_an_error_and_so_is_everything_after_it(
    publisher: Publisher, make_snapshot: MakeSnapshot
) -> None:
    await published(publisher, make_snapshot(3))
    for n in (3, 4):
        with pytest.raises(WeightSyncError, match=r"version \(1, 3\) is not newer than \(1, 3\)"):
            await published(publisher, make_snapshot(n))


async def test_a_process_that_is_killed_is_noticed_without_a_version(publisher: Publisher) -> None:
    child = weights_process()
    child.kill()
    async with asyncio.timeout(10):
        while publisher.fault is None:
            await asyncio.sleep(0.01)
    with pytest.raises(WeightSyncError, match="the weights' process ended"):
        publisher.check()


async def test_a_process_that_stands_still_does_not_hold_a_step_for_ever(
    publisher: Publisher, make_snapshot: MakeSnapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PUBLISH_TIMEOUT_S", 0.2)
    monkeypatch.setattr(module, "_STOP_TIMEOUT_S", 0.2)
    child = weights_process()
    os.kill(child.pid, signal.SIGSTOP)
    with pytest.raises(WeightSyncError, match=r"did not publish version \(1, 0\) within"):
        await published(publisher, make_snapshot(0))
    await publisher.stop()
    assert not is_running(child)


async def test_an_address_that_cannot_be_served_is_a_configuration_error(tmp_path: Path) -> None:
    publisher = Publisher(Stage(tmp_path / "learner"))
    with pytest.raises(ConfigError, match=r"host=0\.0\.0\.0 is not loopback"):
        await publisher.start(serve_on("0.0.0.0"))  # noqa: S104
    await publisher.stop()


async def test_a_failed_write_leaves_no_file_and_the_version_may_be_tried_again(
    publisher: Publisher, make_snapshot: MakeSnapshot, tmp_path: Path
) -> None:
    async def fails(path: Path) -> None:
        await asyncio.to_thread(path.write_bytes, b"half")
        raise WeightSyncError("no room")

    with pytest.raises(WeightSyncError, match="no room"):
        await publisher.publish(PolicyVersion(1, 0), fails)
    assert list((tmp_path / "learner").iterdir()) == []
    await published(publisher, make_snapshot(0))


def test_stages_of_dead_heads_are_removed_and_others_stay(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from services.common.weight_sync.staging import Stage\n"
        "stage = Stage(Path(sys.argv[1])); stage.part(1, 0).touch()\n"
        "(stage.directory / 'v1-0-0001.safetensors').touch(); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "weights-a-1")], check=True, timeout=60)
    assert len(list((tmp_path / "weights-a-1").iterdir())) == 2
    used = Stage(tmp_path / "weights-b-1")
    used.part(1, 0).touch()
    (tmp_path / "others").mkdir()
    remove_abandoned(tmp_path, "weights-")
    assert {path.name for path in tmp_path.iterdir()} == {"weights-b-1", "others"}
    assert len(list((tmp_path / "weights-b-1").iterdir())) == 1
    used.close()
