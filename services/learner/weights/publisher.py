"""How the learner gives its weights away: `publish` puts a version on the shelf, the gRPC server announces and sends it.

training thread                        threads of the server, one per call
  publish(snapshot) ──► Shelf ◄──────  Watch · Fetch · Report  ◄──── rollout servers
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from services.common.config.settings import address, is_loopback
from services.common.errors import ConfigError
from services.common.weights.snapshot import Snapshot
from services.learner.weights.server import ServerReport, WeightService, start_server
from services.learner.weights.store import Shelf

_MAX_SERVERS = 1024  # reports remembered: names come from outside


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
        on_report: Callable[[ServerReport], None] | None = None,
    ) -> None:
        """Starts serving on `host` (port 0 takes a free one); `on_report` is called in a server thread.

        Raises:
            ConfigError: the address cannot be served, or is not loopback and there is no token.
        """
        if token is None and not is_loopback(host):
            raise ConfigError(f"host={host} is not loopback: the weights' server needs a token")
        self._shelf = Shelf(keep)
        self._lock = threading.Lock()
        self._reports: dict[str, ServerReport] = {}
        self._on_report = on_report
        service = WeightService(job_id, self._shelf, self._remember)
        self._server, self.port = start_server(service, host, port, token)
        self.address = address(advertise_host or host, self.port)

    def publish(self, snapshot: Snapshot) -> None:
        """Makes the snapshot the current version and announces it. Takes microseconds and waits for no server.

        Raises:
            WeightSyncError: the version is not newer than the current one.
        """
        self._shelf.put(snapshot)

    @property
    def current(self) -> Snapshot | None:
        """The version published last."""
        return self._shelf.current

    @property
    def digest(self) -> str:
        """Names the weights of the version published last (hex); empty before the first."""
        current = self._shelf.current
        return "" if current is None else current.digest.hex()

    @property
    def reports(self) -> dict[str, ServerReport]:
        """The newest report of each rollout server, by its name."""
        with self._lock:
            return dict(self._reports)

    def stop(self, timeout_s: float = 5.0) -> None:
        """Ends watchers at once and transfers after at most `timeout_s` seconds."""
        self._shelf.close()
        self._server.stop(timeout_s).wait(timeout_s + 1.0)

    def _remember(self, report: ServerReport) -> None:
        with self._lock:
            self._reports.pop(report.server, None)
            self._reports[report.server] = report
            if len(self._reports) > _MAX_SERVERS:
                del self._reports[next(iter(self._reports))]
        if self._on_report is not None:
            self._on_report(report)

    def __enter__(self) -> Self:
        """This publisher."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stops serving."""
        self.stop()
