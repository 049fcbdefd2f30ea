"""The process of the OpenEnv server."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

START_S = 120.0


@contextmanager
def echo_server(python: Path, places: int, where: str | None = None) -> Iterator[str]:
    """Runs `echo_server.py`; its host and port. `python`: one that has the package. `places`: sessions at once."""
    where = where or free_address()
    script = Path(__file__).with_name("echo_server.py")
    process = subprocess.Popen([python, script, where.rpartition(":")[2], str(places)])
    try:
        deadline = time.monotonic() + START_S
        while not _is_healthy(where):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield where
    finally:
        process.kill()
        process.wait()


def free_address() -> str:
    """A host and a port that is free."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def _is_healthy(where: str) -> bool:
    try:
        return httpx.get(f"http://{where}/health").is_success
    except httpx.TransportError:
        return False
