"""Egress of the weights: a few servers fetch a version here, the others from servers that have it already.

           ┌─► r0 ─┬─► r4        `DIRECT` places here, `PER_RELAY` at every server that has reported the version;
learner ───┤       └─► r5        a place is free again when its server reports, or PLACE_S after it was given
           └─► r1 ───► r6
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from services.common.weights.snapshot import PolicyVersion

DIRECT = 4
"""Servers that fetch a version here at the same time, and the bound of what leaves this host once others have it."""
PER_RELAY = 4
PLACE_S = 120.0
_POLL_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class _Place:
    sender: str
    """Address of the relay; "" is here."""
    until: float


class Egress:
    """Places of one learner's rollout servers; thread-safe."""

    def __init__(self, direct: int = DIRECT, per_relay: int = PER_RELAY) -> None:
        self._direct, self._per_relay = direct, per_relay
        self._changed = threading.Condition()
        self._places: dict[str, _Place] = {}
        """By the name of the server that fetches."""
        self._relays: dict[str, PolicyVersion] = {}
        """Address → the version that the server there has in use."""

    def reported(self, server: str, relay: str, version: PolicyVersion, *, failed: bool) -> None:
        """Frees the server's place; from now on it gives the version on at the address `relay`, if it has one."""
        with self._changed:
            self._places.pop(server, None)
            if relay and not failed:
                self._relays[relay] = version
            self._changed.notify_all()

    def place(self, server: str, version: PolicyVersion, *, relays: bool, timeout_s: float) -> str:
        """Address of a relay that has the version, or "" to fetch it here; waits while all places are taken.

        Without `relays` the answer is "" at once: the server does not know relays, or its relay failed, which is then given to nobody else.

        Raises:
            TimeoutError: no place within `timeout_s` seconds.
        """
        until = time.monotonic() + timeout_s
        with self._changed:
            before = self._places.pop(server, None)
            if not relays:
                if before is not None:
                    self._relays.pop(before.sender, None)
                return ""
            while (sender := self._free(version)) is None:
                if time.monotonic() >= until:
                    raise TimeoutError(f"all places to fetch version {version} are taken")
                self._changed.wait(_POLL_INTERVAL_S)
            self._places[server] = _Place(sender, time.monotonic() + PLACE_S)
            return sender

    def _free(self, version: PolicyVersion) -> str | None:
        """A sender with a free place: a relay where there is one, the one with the fewest; None where all are taken."""
        now = time.monotonic()
        self._places = {server: place for server, place in self._places.items() if place.until > now}
        taken = [place.sender for place in self._places.values()]
        having = [address for address, held in self._relays.items() if held == version]
        sender = min(having, key=taken.count, default="")
        return sender if taken.count(sender) < (self._per_relay if sender else self._direct) else None
