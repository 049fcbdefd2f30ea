"""The gateway on a real Redis: in process, and as the process that people run."""
# ruff: noqa: ARG001, ARG002

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator
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
from tests.gateway_process import GatewayProcess, running, write_home

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

    async def admit(self, spec: JobSpec, *, missing: Collection[str] = ()) -> tuple[str, ...]:
        return ()


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
    return write_home(tmp_path / "home")


@pytest.fixture
def own_process(redis_url: str, redis: redis.asyncio.Redis, home: Path) -> Iterator[GatewayProcess]:
    """A gateway for a test that ends it, or reads all that it wrote."""
    with running(redis_url, home) as started:
        yield started


@pytest.fixture(scope="module")
def shared_process(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    home = write_home(tmp_path_factory.mktemp("gateway") / "home")
    with running(redis_url, home, MILLRACE_HUBS="[]") as started:
        yield started


@pytest.fixture
def process(shared_process: GatewayProcess, redis: redis.asyncio.Redis) -> Iterator[GatewayProcess]:
    """A gateway without jobs, which lives longer than a test."""
    yield shared_process
    shared_process.forget_jobs()
