"""Relaying: a rollout server gives the versions that came to it over the network on to other rollout servers.

So the learner sends a version to a few servers, however many there are. What is given on is what was verified here; the server that fetches
compares it with the learner's own digests.
"""

from __future__ import annotations

import logging

from services.common.weight_sync.server import WeightServer
from services.common.weights.snapshot import Snapshot, manifest_digest
from services.common.weights.tensor_file import map_tensors
from services.rollout.weights.fetch import Held

log = logging.getLogger(__name__)

_KEEP = 2
"""As many as stay in the stage: the older one is a possible base of a delta."""


class Relaying:
    """Serves what is offered, from the first offer to `close`. Used by one thread at a time."""

    def __init__(self, job_id: str, host: str, advertise_host: str | None, token: str | None) -> None:
        """Where to serve, on a free port; starts nothing."""
        self._job_id, self._host, self._advertise_host, self._token = job_id, host, advertise_host, token
        self._server: WeightServer | None = None

    @property
    def address(self) -> str:
        """host:port; "" before the first offer."""
        return self._server.address if self._server is not None else ""

    def offer(self, held: Held) -> None:
        """Serves a version of the stage from now on."""
        if self._server is None:
            self._server = WeightServer(
                self._job_id, self._host, 0, self._token, _KEEP, advertise_host=self._advertise_host
            )
            log.info("gives versions on to other servers at %s", self.address)
        current = self._server.current
        if current is not None and held.version <= current.version:
            return
        tensors = map_tensors(held.weights.path)
        data = tuple(tensors[spec.name] for spec in held.specs)
        self._server.publish(Snapshot(*held.version, held.specs, data, manifest_digest(held.specs)))

    def close(self) -> None:
        """Ends the serving."""
        if self._server is not None:
            self._server.stop(1.0)
            self._server = None
