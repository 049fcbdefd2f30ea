"""Health server: `/healthz`, `/readyz` and `/metrics` of a service that has no HTTP of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest

from services.common.errors import ConfigError
from services.common.service.metrics import ProcessMetrics

Check = Callable[[], str | None]
"""Returns None when all is well, else the reason why not."""

ProcessMetrics(REGISTRY)


class HealthServer:
    """HTTP server of the three paths, in a thread.

    `healthy` fails when the process makes no progress and should be restarted; `ready` while it cannot take work yet.
    """

    def __init__(
        self, host: str, port: int, *, healthy: Check, ready: Check, registry: CollectorRegistry = REGISTRY
    ) -> None:
        """Binds at once; port 0 takes a free one. Raises ConfigError when the address is taken or not of this machine."""
        handler = _handler({"/healthz": healthy, "/readyz": ready}, registry)
        try:
            self._server = ThreadingHTTPServer((host, port), handler)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on MILLRACE_BIND_HOST={host}, MILLRACE_METRICS_PORT={port}: {error.strerror or error}"
            ) from error
        self.port: int = self._server.server_address[1]

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, name="health", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def _handler(checks: dict[str, Check], registry: CollectorRegistry) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/metrics":
                self._respond(200, generate_latest(registry), CONTENT_TYPE_LATEST)
            elif path in checks:
                trouble = checks[path]()
                self._respond(200 if trouble is None else 503, (trouble or "ok").encode() + b"\n")
            else:
                self._respond(404, b"not found\n")

        def _respond(self, status: int, body: bytes, content_type: str = "text/plain; charset=utf-8") -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Logs nothing: scrapes would fill the log."""

    return Handler
