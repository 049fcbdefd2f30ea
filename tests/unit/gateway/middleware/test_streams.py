from __future__ import annotations

from services.gateway.middleware.streams import Seat, StreamLimit


def take(limit: StreamLimit, address: str) -> Seat:
    seat = limit.take(address)
    assert seat is not None
    return seat


def test_one_address_may_have_all_seats_while_nobody_else_wants_one() -> None:
    limit = StreamLimit(3)
    seats = [take(limit, "a") for _ in range(3)]
    assert limit.take("a") is None
    seats[1].leave()
    seats[1].leave()
    assert len(limit) == 2
    assert limit.take("a") is not None
    assert not any(seat.lost for seat in seats)


def test_who_has_least_takes_over_the_oldest_seat_of_who_has_most_until_they_have_as_many() -> None:
    limit = StreamLimit(6)
    greedy, woken = [take(limit, "a") for _ in range(5)], []
    other = take(limit, "b")
    greedy[0].on_loss = lambda: woken.append("first")
    assert limit.take("c") is not None
    assert ([seat.lost for seat in greedy], woken) == ([True, False, False, False, False], ["first"])
    assert limit.take("a") is None, "the displaced one does not push the others out in turn"
    assert limit.take("c") is not None
    assert limit.take("c") is None, "nobody has two more than it would have"
    assert (len(limit), other.lost) == (6, False)


def test_a_seat_that_was_taken_over_is_not_given_back_twice() -> None:
    limit = StreamLimit(2)
    lost, kept = take(limit, "a"), take(limit, "a")
    new = take(limit, "b")
    lost.leave()
    assert len(limit) == 2
    for seat in (kept, new):
        seat.leave()
    assert len(limit) == 0
