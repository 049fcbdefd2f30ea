"""What stops a service's start: exit code 2, and one clear line in its own log."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.gateway_process import running

SERVICES = (
    "gateway",
    "learner",
    "environment",
    *(pytest.param(service, marks=pytest.mark.slow) for service in ("reward", "rollout")),
)


def refused(service: str, tmp_path: Path, **variables: str) -> str:
    """The last line of a service that does not start."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("MILLRACE_") and name != "REDIS_URL"},
        "MILLRACE_HOME": str(tmp_path / "home"), "MILLRACE_GATEWAY_PORT": "0", "MILLRACE_REDIS_WAIT_S": "0",
        "REDIS_URL": "redis://127.0.0.1:1/0", **variables,
    }  # fmt: skip
    command = [sys.executable, "-m", f"services.{service}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 2, said
    assert "Traceback" not in said
    assert "canary" not in said
    return said.splitlines()[-1]


@pytest.fixture
def taken() -> Iterator[str]:
    """A port that someone listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield str(listener.getsockname()[1])


@pytest.mark.parametrize("service", SERVICES)
def test_a_missing_secret_is_named(service: str, tmp_path: Path) -> None:
    file = tmp_path / "gone"
    line = refused(service, tmp_path, MILLRACE_REDIS_PASSWORD_FILE=str(file))
    assert line.endswith(f"{service}: MILLRACE_REDIS_PASSWORD_FILE: cannot read {file}: No such file or directory")


@pytest.mark.parametrize("service", SERVICES)
def test_a_wrong_redis_password_is_named_with_its_user_and_not_shown(
    service: str, guarded_port: int, tmp_path: Path
) -> None:
    (tmp_path / "password").write_text("canary")
    line = refused(
        service, tmp_path, REDIS_URL=f"redis://{service}@127.0.0.1:{guarded_port}/0",
        MILLRACE_REDIS_PASSWORD_FILE=str(tmp_path / "password"),
    )  # fmt: skip
    assert f"Redis at 127.0.0.1:{guarded_port} refuses the user '{service}'" in line


@pytest.mark.parametrize("service", ["reward", "environment", "rollout", "learner"])
def test_an_unreachable_redis_is_named(service: str, tmp_path: Path) -> None:
    assert "REDIS_URL: no Redis answers at 127.0.0.1:1" in refused(service, tmp_path)


@pytest.mark.parametrize("service", SERVICES)
def test_a_taken_port_is_named(service: str, guarded_port: int, secrets_dir: Path, taken: str, tmp_path: Path) -> None:
    variable = "MILLRACE_GATEWAY_PORT" if service == "gateway" else "MILLRACE_METRICS_PORT"
    line = refused(
        service, tmp_path, REDIS_URL=f"redis://{service}@127.0.0.1:{guarded_port}/0",
        MILLRACE_REDIS_PASSWORD_FILE=str(secrets_dir / f"redis_{service}_password"), **{variable: taken},
    )  # fmt: skip
    assert f"{variable}={taken}: Address already in use" in line


@pytest.mark.parametrize("service", ["gateway", "rollout", "environment", "learner"])
def test_no_service_listens_beyond_loopback_without_a_token(service: str, tmp_path: Path) -> None:
    line = refused(service, tmp_path, MILLRACE_BIND_HOST="0.0.0.0")  # noqa: S104
    assert "MILLRACE_BIND_HOST=0.0.0.0 is not loopback: set MILLRACE_" in line


def test_a_volume_without_room_stops_the_learner(tmp_path: Path) -> None:
    line = refused("learner", tmp_path, MILLRACE_MIN_FREE_GIB="1000000")
    assert line.startswith(f"learner: MILLRACE_HOME: the volume of {tmp_path}/home/jobs has ")


@pytest.mark.parametrize("service", ["rollout", "learner"])
def test_too_little_memory_is_told_with_both_figures(service: str, tmp_path: Path) -> None:
    line = refused(service, tmp_path, MILLRACE_MIN_MEMORY_GIB="1000000")
    assert "GiB of memory left, and MILLRACE_MIN_MEMORY_GIB=1e+06 are needed" in line


@pytest.mark.parametrize("service", ["rollout", "learner"])
def test_an_image_of_the_wrong_platform_is_named(service: str, tmp_path: Path) -> None:
    line = refused(service, tmp_path, MILLRACE_PLATFORM="npu")
    assert "MILLRACE_PLATFORM=npu: torch_npu is not installed here" in line


def test_a_gateway_without_redis_says_so_and_answers_503_until_it_is_there(tmp_path: Path) -> None:
    with running("redis://gateway@127.0.0.1:1/0", tmp_path / "home") as gateway:
        assert httpx.get(f"{gateway.url}/readyz").status_code == 503
    lines = [line for line in gateway.log.read_text().splitlines() if "REDIS_URL" in line]
    assert len(lines) == 1
    assert "no Redis answers at 127.0.0.1:1" in lines[0]
