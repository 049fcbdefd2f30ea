"""Check of the Host header: the gateway answers only to the names under which it is published.

When the owner of a name points it to 127.0.0.1, a browser treats a page of that name as of the same origin as the
service that listens there (DNS rebinding). The header still has the page's own name. An address cannot be redirected
in this way, so beyond loopback every address is accepted.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from services.common.config.settings import Settings, is_loopback
from services.gateway.errors import error_answer

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:/?#@\s]+)(?::[0-9]{1,5})?")
"""A name or an address, and perhaps a port: tunnels and published ports have other ports than the gateway."""


class HostCheck:
    """Answers 421 unless the header names this gateway, and 400 unless there is exactly one valid header."""

    def __init__(self, app: ASGIApp, *, names: Collection[str], any_address: bool, exempt: Collection[str]) -> None:
        """`names`: in lower case; `any_address`: not only loopback addresses; `exempt`: paths that answer under any name."""
        self._app = app
        self._names, self._exempt = frozenset(names), frozenset(exempt)
        self._any_address = any_address

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
