"""Each tracker's own client, in the process that the gateway starts for it, against a local server or a folder.

Run by `make test-trackers`: the clients are no part of the other environments.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from services.common.errors import ChildTimeout, TrackerError
from services.common.sandbox.limits import Limits
from services.common.sandbox.pool import Child, Sandbox
from services.gateway.trackers.delivery import FILE_BYTES, FOLLOWER, MEMORY_MIB
from tests.trackers.servers import MLflowServer, Server, SwanLabServer, WandBServer
from tests.unit.gateway.trackers.histories import JOB, add_eval, add_step, job_folder, run_of

KEY = "0123456789abcdef0123456789abcdef01234567"
LIMITS = Limits(60.0, MEMORY_MIB, low_priority=True, file_bytes=FILE_BYTES)


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    async with Sandbox(service="gateway-tracker") as opened:
        yield opened


def test_the_gateway_is_imported_with_the_packages_that_the_clients_need() -> None:
    for client in ("swanlab", "wandb", "mlflow"):
        pytest.importorskip(client)
    subprocess.run(
        [sys.executable, "-c", "import swanlab, wandb, mlflow, services.gateway.app"], check=True, timeout=120
    )


async def child(sandbox: Sandbox, tracker: str, folder: Path, **options: str) -> Child:
    return await sandbox.spawn(FOLLOWER, tracker, asdict(run_of(folder, **options)), None, limits=LIMITS)


async def hang_and_begin_again(server: Server, made: Child, again: Callable[[], Awaitable[Child]]) -> Child:
    """The server hangs until the child that waits for it is killed; the next child."""
    server.hang.set()
    with pytest.raises(ChildTimeout):
        await made.request("advance", "", wall_s=6.0)
    server.hang.clear()
    return await again()


async def test_mlflow_has_each_row_once_after_a_server_that_hung(tmp_path: Path, sandbox: Sandbox) -> None:
    pytest.importorskip("mlflow")
    folder, server = job_folder(tmp_path), MLflowServer()
    with server.running() as uri:
        options = {"uri": uri, "MLFLOW_TRACKING_TOKEN": KEY}
        add_step(folder, 1)
        made = await child(sandbox, "mlflow", folder.path, **options)
        assert await made.request("advance", "") == [1, False]
        add_step(folder, 2)
        made = await hang_and_begin_again(server, made, lambda: child(sandbox, "mlflow", folder.path, **options))
        add_eval(folder, 2)
        assert await made.request("advance", "succeeded") == [2, False]
        (folder.path / "trackers" / "mlflow.json").unlink()  # a position that was never recorded
        assert await made.request("advance", "succeeded") == [3, False]
        await made.close()
    losses = sorted((step, value) for _, key, step, _, value in server.rows if key == "actor/loss")
    assert losses == [(1, -0.5), (2, -1.0)]
    assert ("run0", "eval/avg_at_k", 2, 1_002_500, 0.25) in server.rows
    assert [run["info"]["status"] for run in server.runs.values()] == ["FINISHED"]
    assert server.runs["run0"]["info"]["run_name"] == JOB
    assert server.params["learner.steps"] == "20"
    assert server.headers[-1]["Authorization"] == f"Bearer {KEY}"


async def test_mlflow_writes_its_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    folder, uri = job_folder(tmp_path), (tmp_path / "runs").as_uri()
    for step in range(1, 4):
        add_step(folder, step)
    async with Sandbox(service="gateway-tracker") as opened:
        made = await child(opened, "mlflow", folder.path, uri=uri)
        assert await made.request("advance", "failed") == [3, False]
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("millrace")
    (run,) = client.search_runs([experiment.experiment_id])
    assert [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, "actor/loss")] == [
        (1, -0.5), (2, -1.0), (3, -1.5),
    ]  # fmt: skip
    assert (run.info.status, run.data.tags["baseline"], run.data.params["name"]) == ("FAILED", "true", "demo")


async def test_wandb_has_each_line_once_after_a_server_that_hung(tmp_path: Path, sandbox: Sandbox) -> None:
    pytest.importorskip("wandb")
    folder, server = job_folder(tmp_path), WandBServer()
    with server.running() as url:
        options = {"mode": "online", "url": url, "api_key": KEY}
        add_step(folder, 1)
        made = await child(sandbox, "wandb", folder.path, **options)
        assert await made.request("advance", "") == [1, False]
        assert server.exits == []  # the run is not over
        add_step(folder, 2)
        made = await hang_and_begin_again(server, made, lambda: child(sandbox, "wandb", folder.path, **options))
        add_eval(folder, 1)  # of an earlier step
        assert await made.request("advance", "") == [2, False]
        before = (folder.path / "trackers" / "wandb.json").read_bytes()
        add_step(folder, 3)
        assert await made.request("advance", "") == [1, False]
        (folder.path / "trackers" / "wandb.json").write_bytes(before)  # as a kill leaves it: uploaded, and not recorded
        add_step(folder, 4)
        assert await made.request("advance", "failed") == [2, False]
        await made.close()
    lines = server.points(JOB)
    assert [(line["_step"], line["step"], line.get("actor/loss")) for line in lines] == [
        (1, 1, -0.5), (2, 2, -1.0), (3, 1, None), (4, 3, -1.5), (5, 4, -2.0),
    ]  # fmt: skip
    assert lines[0]["_timestamp"] == 1001.0
    assert server.exits == [1]
    assert server.config["learner"]["value"]["steps"] == 20
    assert (server.run["name"], server.run["tags"]) == (JOB, ["baseline"])
    assert not [path for path in folder.path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]


async def test_wandb_offline_leaves_one_run_in_the_folder(tmp_path: Path, sandbox: Sandbox) -> None:
    pytest.importorskip("wandb")
    folder = job_folder(tmp_path)
    made = await child(sandbox, "wandb", folder.path, mode="offline", url="https://api.wandb.ai")
    for step in range(1, 4):
        add_step(folder, step)
        assert await made.request("advance", "") == [0, False]
    assert await made.request("advance", "succeeded") == [3, False]
    await made.close()
    (log,) = folder.path.glob(f"trackers/wandb/wandb/offline-run-*/run-{JOB}.wandb")
    assert b"actor/loss" in log.read_bytes()


async def test_swanlab_has_each_point_once_after_a_server_that_hung(tmp_path: Path, sandbox: Sandbox) -> None:
    pytest.importorskip("swanlab")
    folder, server = job_folder(tmp_path), SwanLabServer()
    with server.running() as url:
        options = {"mode": "online", "url": url, "api_key": KEY}
        add_step(folder, 1)
        made = await child(sandbox, "swanlab", folder.path, **options)
        assert await made.request("advance", "") == [1, False]
        add_step(folder, 2)
        made = await hang_and_begin_again(server, made, lambda: child(sandbox, "swanlab", folder.path, **options))
        add_eval(folder, 1)
        assert await made.request("advance", "failed") == [2, False]
        await made.close()
    assert [(step, value) for (name, step), value in server.values.items() if name == "actor/loss"] == [
        (1, -0.5),
        (2, -1.0),
    ]
    assert server.values["eval/avg_at_k", 1] == 0.25
    assert server.states[-1] == "CRASHED"
    assert {item["cuid"] for item in server.experiments} == {JOB}
    assert not [path for path in folder.path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]


async def test_swanlab_offline_leaves_one_run_in_the_folder(tmp_path: Path, sandbox: Sandbox) -> None:
    pytest.importorskip("swanlab")
    folder = job_folder(tmp_path)
    made = await child(sandbox, "swanlab", folder.path, mode="offline")
    for step in range(1, 4):
        add_step(folder, step)
        assert await made.request("advance", "") == [0, False]
    assert await made.request("advance", "succeeded") == [3, False]
    await made.close()
    assert list(folder.path.glob("trackers/swanlab/run-*"))


@pytest.mark.parametrize("tracker", ["mlflow", "wandb", "swanlab"])
async def test_a_server_that_is_not_there_is_an_error_without_the_key(
    tmp_path: Path, sandbox: Sandbox, tracker: str
) -> None:
    pytest.importorskip(tracker)
    folder, gone = job_folder(tmp_path), "http://127.0.0.1:9"
    add_step(folder, 1)
    options = {"uri": gone, "url": gone, "mode": "online", "api_key": KEY, "MLFLOW_TRACKING_TOKEN": KEY}
    made = await child(sandbox, tracker, folder.path, **options)
    with pytest.raises((TrackerError, ChildTimeout)) as raised:
        await made.request("advance", "", wall_s=8.0)
    assert KEY not in str(raised.value)
    assert not (folder.path / "trackers" / f"{tracker}.json").exists()
