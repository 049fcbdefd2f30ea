"""A hub on this machine, and fetchers whose children know no other."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from services.common.config.settings import Settings
from services.common.hubs import fetcher as module
from services.common.hubs.fetcher import Fetcher
from services.common.sandbox.pool import Sandbox
from tests.fake_hub import FakeHub

TOKEN = "hf_token-of-these-tests"  # noqa: S105


@pytest.fixture(scope="session")
def servers() -> Iterator[FakeHub]:
    with FakeHub() as hub:
        yield hub


@pytest.fixture(scope="session")
def children(servers: FakeHub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    """Children of one forkserver, which has imported the hubs' libraries once."""
    variables = {
        "HF_ENDPOINT": servers.url,
        "MODELSCOPE_DOMAIN": servers.url,
        "HF_TOKEN": TOKEN,
        "MODELSCOPE_API_TOKEN": TOKEN,
    }
    private = {"HF_HOME": str(tmp_path_factory.mktemp("hf")), "MODELSCOPE_HOME": str(tmp_path_factory.mktemp("ms"))}
    environment = module.child_environment(variables) | variables | private
    shared = Sandbox(prepare=[module.PREPARE], service="hub", environment=environment)
    yield shared
    asyncio.run(shared.stop())


@pytest.fixture
def hub(servers: FakeHub) -> Iterator[FakeHub]:
    """The hub without repositories."""
    servers.repos.clear()
    servers.be_well()
    yield servers
    servers.be_well()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks at a fetch more often, and does not pause long between tries."""
    monkeypatch.setattr(module, "POLL_INTERVAL_S", 0.05)
    monkeypatch.setattr(module, "MAX_PAUSE_S", 0.05)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path / "home", hub_stall_s=1.0)


@pytest.fixture
def fetcher(children: Sandbox, settings: Settings) -> Fetcher:
    return Fetcher(children, settings)


@pytest.fixture(params=["hf", "modelscope"])
def name(request: pytest.FixtureRequest) -> str:
    """Every hub, by name."""
    if request.param == "modelscope" and find_spec("modelscope_hub") is None:
        pytest.skip("modelscope_hub is not installed")
    return str(request.param)
