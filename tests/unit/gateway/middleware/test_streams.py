from __future__ import annotations

from services.gateway.middleware.streams import StreamLimit, StreamPermit


def take(limit: StreamLimit, address: str) -> StreamPermit:
    permit = limit.acquire(address)
    assert permit is not None
    return permit


def test_one_address_may_have_all_permits_while_nobody_else_wants_one() -> None:
    limit = StreamLimit(3)
    permits = [take(limit, "a") for _ in range(3)]
    assert limit.acquire("a") is None
    permits[1].release()
    permits[1].release()
    assert len(limit) == 2
    assert limit.acquire("a") is not None
    assert not any(permit.lost for permit in permits)


def test_who_has_least_takes_over_the_oldest_permit_of_who_has_most_until_they_have_as_many() -> None:
    limit = StreamLimit(6)
    greedy, woken = [take(limit, "a") for _ in range(5)], []
    other = take(limit, "b")
    greedy[0].on_loss = lambda: woken.append("first")
    assert limit.acquire("c") is not None
    assert ([permit.lost for permit in greedy], woken) == ([True, False, False, False, False], ["first"])
    assert limit.acquire("a") is None, "the displaced one does not push the others out in turn"
    assert limit.acquire("c") is not None
    assert limit.acquire("c") is None, "nobody has two more than it would have"
    assert (len(limit), other.lost) == (6, False)


def test_a_permit_that_was_taken_over_is_not_given_back_twice() -> None:
    limit = StreamLimit(2)
    lost, kept = take(limit, "a"), take(limit, "a")
    new = take(limit, "b")
    lost.release()
    assert len(limit) == 2
    for permit in (kept, new):
        permit.release()
    assert len(limit) == 0
