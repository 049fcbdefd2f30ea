"""The console in headless Chromium, on a real gateway process and a real Redis."""
# ruff: noqa: ARG001

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import redis.asyncio as redis_asyncio
from playwright.async_api import Browser, ConsoleMessage, Page, Request, async_playwright, expect

from services.common.jobs.store import JobStore
from services.common.redis.connection import connect
from tests.gateway_process import GatewayProcess, running, write_home

ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync",
]  # fmt: skip
PATIENCE_MS = 20_000

expect.set_options(timeout=PATIENCE_MS)


@dataclass
class Console:
    """The page, and what went wrong on it."""

    page: Page
    gateway: GatewayProcess
    expected: list[str] = field(default_factory=list)
    """Parts of console messages that the test brings about."""
    faults: list[str] = field(default_factory=list)

    async def open(self, address: str = "") -> None:
        """The view at `#…`, as a person who has signed in sees it."""
        await self.page.goto(f"{self.gateway.url}/console/{address}")

    async def sign_in(self, address: str = "#/jobs") -> None:
        await self.open(address)
        await self.page.get_by_label("Gateway token").fill(self.gateway.token)
        await self.page.get_by_role("button", name="Sign in").click()
        await expect(self.page.get_by_label("Gateway token")).to_have_count(0)

    def hear(self, message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"} and not any(part in message.text for part in self.expected):
            self.faults.append(f"console {message.type}: {message.text}")

    def watch(self, request: Request) -> None:
        if not request.url.startswith(f"{self.gateway.url}/"):
            self.faults.append(f"request to another host: {request.url}")
        if self.gateway.token in request.url:
            self.faults.append("the token stands in an address")


@pytest.fixture(scope="session")
def chromium() -> str:
    """The system's Chromium."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("Chromium is not installed (apt-get install chromium): the console is not tested in a browser")
    return program


@pytest.fixture(scope="session")
def gateway(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    with running(redis_url, write_home(tmp_path_factory.mktemp("console") / "home")) as process:
        yield process


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs these tests on one event loop, the browser's; a browser takes long."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)
            item.add_marker(pytest.mark.slow)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser(chromium: str) -> AsyncIterator[Browser]:
    """One for all tests, each of which has a context, and so cookies and storage, of its own."""
    async with async_playwright() as playwright:
        opened = await playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        yield opened
        await opened.close()


@pytest_asyncio.fixture(loop_scope="session")
async def redis(redis_url: str) -> AsyncIterator[redis_asyncio.Redis]:
    """An empty one, on the event loop of the browser."""
    async with connect(redis_url, block_s=2.0) as client:
        await client.flushall()
        yield client


@pytest_asyncio.fixture(loop_scope="session")
async def console(browser: Browser, gateway: GatewayProcess, redis: redis_asyncio.Redis) -> AsyncIterator[Console]:
    """A tab on a gateway without jobs. The test fails over any error on the page and any request to another host."""
    context = await browser.new_context(viewport={"width": 1280, "height": 800})
    page = await context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    opened = Console(page, gateway)
    page.on("console", opened.hear)
    page.on("pageerror", lambda error: opened.faults.append(f"uncaught: {error}"))
    page.on("request", opened.watch)
    yield opened
    await context.close()
    gateway.forget_jobs()
    assert not opened.faults


@pytest.fixture
def store(redis: redis_asyncio.Redis) -> JobStore:
    return JobStore(redis)


@pytest.fixture
def document() -> dict[str, Any]:
    return {
        "name": "demo",
        "model": {"path": "tiny"},
        "data": {"train": {"source": "reasoning_gym:chain_sum"}},
        "learner": {"steps": 20},
    }
