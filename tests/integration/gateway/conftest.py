"""The gateway on a real Redis: in process, and as the process that people run."""
# ruff: noqa: ARG001, ARG002

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio
from fastapi import FastAPI

from services.common.config.settings import Settings
from services.common.errors import ConfigError
from services.common.jobs.store import JobStore
from services.common.sandbox.pool import Sandbox
from services.common.spec.job import JobSpec
from services.gateway.admission.admission import PREPARE, Admission
from services.gateway.admission.spec_body import parse_body
from services.gateway.app import create_app
from services.gateway.dependencies import EventTimes
from services.gateway.errors import SpecRefused
from tests.tiny_model import write_tiny_model

TOKEN = "the-token-of-these-tests-0123456789abcdef"  # noqa: S105


class AllowAll(Admission):
    """Admission that finds nothing wrong with a spec: for tests of what comes after it."""

    def __init__(self) -> None:
        """Starts no sandbox."""

    async def read(self, body: bytes, media_type: str) -> JobSpec:
        try:
            return parse_body(body, media_type)
        except ConfigError as error:
            raise SpecRefused(*error.problems) from error

    async def admit(self, spec: JobSpec) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True)
class Process:
    """A running gateway."""

    url: str
    home: Path
    log: Path
    popen: subprocess.Popen[bytes]

    def stop(self) -> int:
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(20)


@pytest.fixture
def token() -> str:
    return TOKEN


@pytest.fixture
def document() -> dict[str, Any]:
    return {"name": "demo", "model": {"path": "tiny"}, "data": {"train": {"source": "reasoning_gym:chain_sum"}}}


@pytest.fixture
def store(redis: redis.asyncio.Redis) -> JobStore:
    return JobStore(redis)


@pytest.fixture
def unchecked() -> AllowAll:
    return AllowAll()


@pytest.fixture
def app(redis: redis.asyncio.Redis, tmp_path: Path, unchecked: AllowAll) -> FastAPI:
    times = EventTimes(poll_s=0.05, heartbeat_s=0.2)
    settings = Settings(home=tmp_path, gateway_hosts=["gateway"])
    return create_app(settings, redis, TOKEN, admission=unchecked, event_times=times)


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """Bears the token."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=headers) as opened:
        yield opened


@pytest.fixture
async def stranger(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """Bears nothing."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as opened:
        yield opened


@pytest.fixture(scope="session")
def sandbox() -> Iterator[Sandbox]:
    """Children that are warm, for all tests of this session."""
    shared = Sandbox(prepare=[PREPARE])
    yield shared
    asyncio.run(shared.stop())


@pytest.fixture
def admission(home: Path, sandbox: Sandbox) -> Admission:
    """The real checks of what lies in `home`."""
    return Admission(sandbox, Settings(home=home))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with a registered model named `tiny`: 4 heads, 2 key-value heads."""
    folder = tmp_path / "home"
    write_tiny_model(folder / "models" / "tiny")
    return folder


@pytest.fixture
def process(redis_url: str, redis: redis.asyncio.Redis, home: Path, tmp_path: Path) -> Iterator[Process]:
    """`python -m services.gateway` on a free port, with the token that it made itself."""
    with running(redis_url, home, tmp_path / "gateway.log") as started:
        yield started


@pytest.fixture
def start_gateway() -> Callable[..., AbstractContextManager[Process]]:
    """Runs a gateway within a `with`: Redis URL, home, log file, further variables."""
    return running


@contextmanager
def running(redis_url: str, home: Path, log: Path, **variables: str) -> Iterator[Process]:
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
    with log.open("wb") as file:
        popen = subprocess.Popen([sys.executable, "-m", "services.gateway"], env=environment, stdout=file, stderr=file)
    try:
        wait_until_answering(f"http://127.0.0.1:{port}/healthz", popen)
        yield Process(f"http://127.0.0.1:{port}", home, log, popen)
    finally:
        popen.kill()
        popen.wait()


def wait_until_answering(url: str, popen: subprocess.Popen[bytes]) -> None:
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
