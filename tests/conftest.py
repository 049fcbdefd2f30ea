"""Fixtures that every test may use: a real Redis-compatible server of our own, and free ports."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import hypothesis
import pytest
import redis as sync_redis
from redis.asyncio import Redis

REDIS_SERVER_ALWAYS = ("integration/common", "integration/deploy/test_redis_users.py", "unit")
"""Tested on redis-server, too, every time: streams, scripts, users' rights. The rest sees Redis through these: that is for the long run."""


ROOT = Path(__file__).parents[1]

hypothesis.settings.register_profile("millrace", deadline=None)  # other tests have the cores, too
hypothesis.settings.load_profile("millrace")


def pytest_configure() -> None:
    """What every engine compiles for its sampler is compiled once. And Ctrl-C is tested, which commands in the background ignore."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(ROOT / ".millrace" / "cache" / "torchinductor"))
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as slow what need not meet the second Redis every time."""
    always = [Path(__file__).parent / place for place in REDIS_SERVER_ALWAYS]
    for item in items:
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if "system" in parameters.values() and not any(item.path.is_relative_to(place) for place in always):
            item.add_marker(pytest.mark.slow)


def server_binaries() -> list[str]:
    """The embedded server, and Debian's redis-server where it is installed."""
    from services.cli.stack.redis import server_binary

    system = shutil.which("redis-server")
    return [str(server_binary()), *([system] if system else [])]


@pytest.fixture(scope="session", params=["embedded", "system"])
def redis_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a real server on a free port, in a temporary directory, with AOF on: the embedded one, then redis-server."""
    binaries = server_binaries()
    if request.param == "system" and len(binaries) == 1:
        pytest.skip("redis-server is not installed; the embedded server was tested")
    binary = binaries[0] if request.param == "embedded" else binaries[1]
    from services.cli.stack.children import free_port

    folder: Path = tmp_path_factory.mktemp("redis")
    port = free_port()
    arguments = [
        binary,
        "--bind",
        "127.0.0.1",
        "--port",
        str(port),
        "--dir",
        str(folder),
        "--appendonly",
        "yes",
        "--save",
        "",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(arguments, stdout=log, stderr=log)
    url = f"redis://127.0.0.1:{port}/0"
    try:
        wait_for_redis(url)
        yield url
    finally:
        process.kill()
        process.wait()


def wait_for_redis(url: str, timeout_s: float = 20.0) -> None:
    """Waits until the server answers PING."""
    client = sync_redis.Redis.from_url(url)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            client.ping()
        except sync_redis.ConnectionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            client.close()
            return


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    """A client on an empty database."""
    from services.common.redis.connection import connect

    client = connect(redis_url, block_s=2.0)
    await client.flushall()
    yield client
    await client.aclose()


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No look-ups at any hub."""
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
