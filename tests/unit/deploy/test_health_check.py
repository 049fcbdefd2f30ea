"""deploy/docker/healthy.py, the containers' health check."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from prometheus_client import CollectorRegistry

from services.cli.stack.children import free_port
from services.common.service.health import HealthServer

SCRIPT = Path(__file__).parents[3] / "deploy/docker/healthy.py"


def check(port: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), f"http://127.0.0.1:{port}/readyz"]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def test_a_container_is_healthy_when_its_service_says_so_and_else_the_reason_is_shown() -> None:
    trouble: list[str | None] = [None]
    with HealthServer(
        "127.0.0.1", 0, healthy=lambda: None, ready=lambda: trouble[0], registry=CollectorRegistry()
    ) as server:
        assert check(server.port).returncode == 0
        trouble[0] = "draining"
        done = check(server.port)
        assert (done.returncode, done.stderr) == (1, "503: draining\n")


def test_a_service_that_does_not_answer_is_not_healthy() -> None:
    port = free_port()
    done = check(port)
    assert done.returncode == 1
    assert done.stderr.startswith(f"http://127.0.0.1:{port}/readyz does not answer: ")
    assert "Traceback" not in done.stderr
