"""Limit of open event streams: a total, shared between the clients' addresses.

Every client gets a permit while there are free ones. When there are none, a client whose address has fewer permits than
another's takes over the oldest permit of the address that has the most: that stream ends, and its client may reconnect.
Behind a proxy all clients have one address, and no stream is displaced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class StreamPermit:
    """The right to one open stream."""

    limit: StreamLimit
    address: str
    lost: bool = False
    """Whether another client has taken it over."""
    on_loss: Callable[[], None] = lambda: None
    """Wakes the stream, so that it ends."""

    def release(self) -> None:
        """Releases it; safe to repeat."""
        self.limit.release(self)


class StreamLimit:
    """All permits, and which are taken."""

    def __init__(self, permits: int) -> None:
        """`permits`: most streams at once."""
        self.permits = permits
        self._taken: dict[StreamPermit, None] = {}  # the oldest first
        self._by_address: Counter[str] = Counter()

    def __len__(self) -> int:
        """Permits that are taken."""
        return len(self._taken)

    def acquire(self, address: str) -> StreamPermit | None:
        """A permit, or None when there is none for this address."""
        if len(self._taken) >= self.permits and not self._displace(address):
            return None
        permit = StreamPermit(self, address)
        self._taken[permit] = None
        self._by_address[address] += 1
        return permit

    def release(self, permit: StreamPermit) -> None:
        """Releases a permit, unless another client has taken it over before."""
        if permit in self._taken:
            del self._taken[permit]
            self._by_address[permit.address] -= 1
            if not self._by_address[permit.address]:
                del self._by_address[permit.address]

    def _displace(self, address: str) -> bool:
        """Releases the oldest permit of the address with the most permits, if the new client's address then has no more than that one."""
        largest, most = self._by_address.most_common(1)[0]
        if most <= self._by_address[address] + 1:
            return False
        permit = next(permit for permit in self._taken if permit.address == largest)
        self.release(permit)
        permit.lost = True
        permit.on_loss()
        return True
