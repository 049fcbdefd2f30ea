"""Access: the Host header names the gateway as it is published; all but a few paths need a bearer token, before any route is matched."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import os
import re
import secrets
import socket
from collections.abc import Collection
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from services.common.config.settings import Settings, is_loopback
from services.common.errors import ConfigError
from services.gateway.errors import error_answer

log = logging.getLogger(__name__)

TOKEN_FILE = "gateway.token"  # noqa: S105  a file's name
TOKEN_BYTES = 32
MIN_SHARED_TOKEN_CHARS = 32
"""Shortest token for an address that other machines can reach."""

ALWAYS_OPEN = frozenset({"/healthz", "/readyz"})
OPEN_ON_LOOPBACK = frozenset({"/metrics", "/docs", "/openapi.json"})


def load_token(settings: Settings) -> str:
    """The gateway's token: the one that is set, else the one in `<home>/gateway.token`, which is created (mode 0600) when missing.

    Raises:
        ConfigError: no token is set and the address is not loopback, or the token is not valid; never shows the token.
    """
    settings.require_token_beyond_loopback(settings.token, "MILLRACE_TOKEN")
    if settings.token is None:
        path = settings.home / TOKEN_FILE
        return _validated(_read_or_create(path), str(path))
    token = _validated(settings.token.get_secret_value(), "MILLRACE_TOKEN")
    if len(token) < MIN_SHARED_TOKEN_CHARS and not is_loopback(settings.bind_host):
        raise ConfigError(
            f"MILLRACE_TOKEN has {len(token)} characters; beyond loopback it needs {MIN_SHARED_TOKEN_CHARS} "
            "(`openssl rand -hex 32` makes one)"
        )
    return token


def open_paths(settings: Settings) -> frozenset[str]:
    """Paths that need no token at this address."""
    return ALWAYS_OPEN | OPEN_ON_LOOPBACK if is_loopback(settings.bind_host) else ALWAYS_OPEN


class BearerAuth:
    """Answers 401, always the same, unless the request carries the token or its path is open."""

    def __init__(self, app: ASGIApp, *, token: str, open_paths: frozenset[str]) -> None:
        self._app, self._open = app, open_paths
        self._digest = _digest(token)  # the token itself is not kept

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if scope["type"] == "http" and scope["path"] not in self._open and not self._allowed(Headers(scope=scope)):
            headers = {"WWW-Authenticate": 'Bearer realm="millrace"'}
            await error_answer(401, "a valid bearer token is needed", headers=headers)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _allowed(self, headers: Headers) -> bool:
        values = headers.getlist("authorization")
        if len(values) != 1:
            return False
        scheme, _, given = values[0].partition(" ")
        return hmac.compare_digest(_digest(given.strip()), self._digest) and scheme.lower() == "bearer"


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _validated(token: str, source: str) -> str:
    if not token:
        raise ConfigError(f"{source} is empty: set a token, or remove it to have one made")
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(f"{source} holds characters that an HTTP header cannot carry")
    return token


def _read_or_create(path: Path) -> str:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            _create(path)
        if path.stat().st_mode & 0o077:
            log.warning("%s was readable by others: mode set to 0600", path)
            path.chmod(0o600)
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"{path}: the gateway's token cannot be kept there: {error.strerror}") from error


def _create(path: Path) -> None:
    """Writes a new token to a draft and links it to the path: of several processes one wins, and none reads half a token."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(secrets.token_urlsafe(TOKEN_BYTES) + "\n")
            file.flush()
            os.fsync(file.fileno())
        path.hardlink_to(draft)
    except FileExistsError:
        return
    finally:
        draft.unlink()


_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:/?#@\s]+)(?::[0-9]{1,5})?")
"""A name or an address, and perhaps a port: tunnels and published ports have other ports than the gateway."""


class HostCheck:
    """Answers 421 unless the header names this gateway, and 400 unless there is exactly one valid header."""

    def __init__(self, app: ASGIApp, *, names: Collection[str], any_address: bool, exempt: Collection[str]) -> None:
        """`names`: in lower case; `any_address`: not only loopback addresses; `exempt`: paths that answer under any name."""
        self._app, self._any_address = app, any_address
        self._names, self._exempt = frozenset(names), frozenset(exempt)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if scope["type"] != "http" or scope["path"] in self._exempt:
            await self._app(scope, receive, send)
            return
        hosts = Headers(scope=scope).getlist("host")
        host = _HOST.fullmatch(hosts[0].strip().lower()) if len(hosts) == 1 else None
        if host is None:
            await error_answer(400, "one Host header is needed")(scope, receive, send)
        elif not self._known(host[1].removesuffix(".")):
            message = "the gateway is not published under this name: MILLRACE_GATEWAY_HOSTS lists further ones"
            await error_answer(421, message)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _known(self, name: str) -> bool:
        if name in self._names or name.endswith(".localhost"):
            return True
        try:
            address = ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return self._any_address or address.is_loopback


def published_names(settings: Settings) -> frozenset[str]:
    """The names and addresses, in lower case, under which clients reach a gateway with these settings."""
    names = {"localhost", settings.bind_host, settings.advertise_host or "", *settings.gateway_hosts}
    if not is_loopback(settings.bind_host):
        names.add(socket.gethostname())
    return frozenset(name.lower().strip("[]").removesuffix(".") for name in names if name)
