"""Limit of open event streams: a total, shared between the clients' addresses.

Every client gets a seat while there are free ones. When there are none, a client whose address has fewer seats than
another's takes over the oldest seat of the address that has the most: that stream ends, and its client may reconnect.
Behind a proxy all clients have one address, and no stream is displaced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class Seat:
    """The right to one open stream."""

    limit: StreamLimit
    address: str
    lost: bool = False
    """Whether another client has taken it over."""
    on_loss: Callable[[], None] = lambda: None
    """Wakes the stream, so that it ends."""

    def leave(self) -> None:
        """Frees it; safe to repeat."""
        self.limit.free(self)


class StreamLimit:
    """All seats, and which are taken."""

    def __init__(self, seats: int) -> None:
        """`seats`: most streams at once."""
        self.seats = seats
        self._taken: dict[Seat, None] = {}  # the oldest first
        self._by_address: Counter[str] = Counter()

    def __len__(self) -> int:
        """Seats that are taken."""
        return len(self._taken)

    def take(self, address: str) -> Seat | None:
        """A seat, or None when there is none for this address."""
        if len(self._taken) >= self.seats and not self._displace(address):
            return None
        seat = Seat(self, address)
        self._taken[seat] = None
        self._by_address[address] += 1
        return seat

    def free(self, seat: Seat) -> None:
        """Frees a seat, unless another client has taken it over before."""
        if seat in self._taken:
            del self._taken[seat]
            self._by_address[seat.address] -= 1
            if not self._by_address[seat.address]:
                del self._by_address[seat.address]

    def _displace(self, address: str) -> bool:
        """Frees the oldest seat of the address with the most seats, if the new client's address then has no more than that one."""
        largest, most = self._by_address.most_common(1)[0]
        if most <= self._by_address[address] + 1:
            return False
        seat = next(seat for seat in self._taken if seat.address == largest)
        self.free(seat)
        seat.lost = True
        seat.on_loss()
        return True
