"""`/healthz`, `/readyz` and `/metrics` of a service that has no HTTP of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self

from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest

from services.common.errors import ConfigError
from services.common.service.metrics import ProcessMetrics

Check = Callable[[], str | None]
"""Answers None when all is well, else why not."""

PROCESS_METRICS = ProcessMetrics(REGISTRY)


class HealthServer:
    """Serves the three paths from a thread.

    `healthy` fails when the process makes no progress and should be restarted; `ready` while it cannot take work yet.
    """

    def __init__(
        self, host: str, port: int, *, healthy: Check, ready: Check, registry: CollectorRegistry = REGISTRY
    ) -> None:
        """Binds at once; port 0 takes a free one.

        Raises:
            ConfigError: the address is taken, or is not of this machine.
        """
        handler = _handler({"/healthz": healthy, "/readyz": ready}, registry)
        try:
            self._server = ThreadingHTTPServer((host, port), handler)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on MILLRACE_BIND_HOST={host}, MILLRACE_METRICS_PORT={port}: {error.strerror or error}"
            ) from error
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="health", daemon=True)

    def __enter__(self) -> Self:
        """Begins to answer."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stops answering and frees the port."""
        self._server.shutdown()
        self._server.server_close()


def _handler(checks: dict[str, Check], registry: CollectorRegistry) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/metrics":
                self._answer(200, generate_latest(registry), CONTENT_TYPE_LATEST)
            elif path in checks:
                trouble = checks[path]()
                self._answer(
                    200 if trouble is None else 503, (trouble or "ok").encode() + b"\n", "text/plain; charset=utf-8"
                )
            else:
                self._answer(404, b"not found\n", "text/plain; charset=utf-8")

        def _answer(self, status: int, body: bytes, content_type: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Scrapes are not worth a line each."""

    return Handler
