"""The gateway as the process that people run, for tests that reach it over a socket."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.tiny_model import write_tiny_model


@dataclass(frozen=True)
class GatewayProcess:
    """A running gateway."""

    url: str
    home: Path
    log: Path
    popen: subprocess.Popen[bytes]

    @property
    def token(self) -> str:
        """The token that it made for its home."""
        return (self.home / "gateway.token").read_text().strip()

    @property
    def bearer(self) -> dict[str, str]:
        """The header that lets people in."""
        return {"Authorization": f"Bearer {self.token}"}

    def forget_jobs(self) -> None:
        """Leaves no folder from which it would put the jobs of one test back into the emptied Redis of the next."""
        shutil.rmtree(self.home / "jobs", ignore_errors=True)

    def stop(self) -> int:
        """Drains it; its exit code."""
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(20)


def write_home(folder: Path) -> Path:
    """A home with a registered model named `tiny`: 4 heads, 2 key-value heads."""
    write_tiny_model(folder / "models" / "tiny")
    return folder


@contextmanager
def running(redis_url: str, home: Path, **variables: str) -> Iterator[GatewayProcess]:
    """A gateway in this home until the end of the `with`; its log lies where `millrace up` writes it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("MILLRACE_")},
        "REDIS_URL": redis_url,
        "MILLRACE_HOME": str(home),
        "MILLRACE_GATEWAY_PORT": str(port),
        **variables,
    }
    log = home / "logs" / "gateway.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        popen = subprocess.Popen([sys.executable, "-m", "services.gateway"], env=environment, stdout=file, stderr=file)
    try:
        _wait_until_answering(f"http://127.0.0.1:{port}/healthz", popen)
        yield GatewayProcess(f"http://127.0.0.1:{port}", home, log, popen)
    finally:
        popen.kill()
        popen.wait()


def _wait_until_answering(url: str, popen: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert popen.poll() is None, "the gateway ended at its start"
        try:
            httpx.get(url, timeout=2)
        except httpx.TransportError:
            time.sleep(0.05)
        else:
            return
    raise AssertionError("the gateway did not come up within 60 s")
