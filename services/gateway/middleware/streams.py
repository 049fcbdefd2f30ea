"""Limit of open event streams: so many in all, shared out between those who ask.

While there are free seats anybody takes one. When there are none, a client whose address has fewer than another's takes
over the oldest seat of the address that has the most: that stream ends, and may come again. Behind a proxy all clients
have one address, and nobody is displaced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable


class Seat:
    """One open stream's."""

    def __init__(self, limit: StreamLimit, address: str) -> None:
        """Taken."""
        self.address = address
        self.lost = False
        """Whether another client has it now."""
        self.on_loss: Callable[[], None] = lambda: None
        """Wakes the stream, so that it ends."""
        self._limit = limit

    def leave(self) -> None:
        """Gives it back, once or more often."""
        self._limit.free(self)


class StreamLimit:
    """All seats."""

    def __init__(self, seats: int) -> None:
        """`seats`: most streams at once."""
        self.seats = seats
        self._taken: dict[Seat, None] = {}  # the oldest first
        self._of: Counter[str] = Counter()

    def __len__(self) -> int:
        """Seats that are taken."""
        return len(self._taken)

    def take(self, address: str) -> Seat | None:
        """A seat, or None when there is none for this address."""
        if len(self._taken) >= self.seats and not self._displace(address):
            return None
        seat = Seat(self, address)
        self._taken[seat] = None
        self._of[address] += 1
        return seat

    def free(self, seat: Seat) -> None:
        """Takes a seat back that may have been taken over before."""
        if seat in self._taken:
            del self._taken[seat]
            self._of[seat.address] -= 1
            if not self._of[seat.address]:
                del self._of[seat.address]

    def _displace(self, address: str) -> bool:
        """Frees the oldest seat of the address that has the most, where the newcomer's would still have no more."""
        greedy, most = self._of.most_common(1)[0]
        if most <= self._of[address] + 1:
            return False
        seat = next(seat for seat in self._taken if seat.address == greedy)
        self.free(seat)
        seat.lost = True
        seat.on_loss()
        return True
