"""Publisher of the learner's weights: `publish` stores a version, and the gRPC server announces and sends it.

training thread                        threads of the server, one per call
  publish(snapshot) ──► WeightStore ◄──────  Watch · Fetch · Report  ◄──── rollout servers
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Self

from services.common.config.settings import address, is_loopback
from services.common.errors import ConfigError
from services.common.weights.snapshot import Snapshot
from services.learner.weights.server import ServerReport, WeightService, start_server
from services.learner.weights.store import WeightStore

_MAX_SERVERS = 1024  # rollout servers whose reports are kept: their names come from outside


class Publisher:
    """Serves one job's policy versions to any number of rollout servers, from construction to `stop`."""

    def __init__(
        self,
        job_id: str,
        host: str,
        port: int,
        token: str | None,
        keep: int = 3,
        *,
        advertise_host: str | None = None,
        on_report: Callable[[ServerReport], None] = lambda _: None,
    ) -> None:
        """Starts serving on `host` (port 0 takes a free one); `on_report` is called in a server thread.

        Raises:
            ConfigError: the address cannot be served, or is not loopback and there is no token.
        """
        if token is None and not is_loopback(host):
            raise ConfigError(f"host={host} is not loopback: the weights' server needs a token")
        self._store = WeightStore(keep)
        self._lock = threading.Lock()
        self._reports: dict[str, ServerReport] = {}
        self._on_report = on_report
        service = WeightService(job_id, self._store, self._keep_report)
        self._server, self.port = start_server(service, host, port, token)
        self.address = address(advertise_host or host, self.port)

    def publish(self, snapshot: Snapshot) -> None:
        """Makes the snapshot the current version and announces it. Takes microseconds and does not wait for servers.

        Raises:
            WeightSyncError: the version is not newer than the current one.
        """
        self._store.put(snapshot)

    @property
    def current(self) -> Snapshot | None:
        """The version published last."""
        return self._store.current

    @property
    def digest(self) -> str:
        """Digest of the version published last (hex); empty before the first."""
        current = self._store.current
        return "" if current is None else current.digest.hex()

    @property
    def reports(self) -> dict[str, ServerReport]:
        """The newest report of each rollout server, by its name."""
        with self._lock:
            return dict(self._reports)

    def stop(self, timeout_s: float = 5.0) -> None:
        """Ends `Watch` calls at once, and transfers after at most `timeout_s` seconds."""
        self._store.close()
        self._server.stop(timeout_s).wait(timeout_s + 1.0)

    def _keep_report(self, report: ServerReport) -> None:
        with self._lock:
            self._reports.pop(report.server, None)
            self._reports[report.server] = report
            if len(self._reports) > _MAX_SERVERS:
                del self._reports[next(iter(self._reports))]
        self._on_report(report)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
