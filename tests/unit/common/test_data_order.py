"""The order of tasks: a pure function of seed and ordinal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.data.order import _permutation, task_index

seeds = st.integers(0, 2**31 - 1)
sizes = st.integers(1, 300)
epochs = st.integers(0, 10**9)


def epoch_of(seed: int, epoch: int, size: int) -> list[int]:
    return [task_index(seed, epoch * size + position, size, shuffle=True) for position in range(size)]


@given(seeds, epochs, sizes)
def test_each_epoch_visits_every_task_once(seed: int, epoch: int, size: int) -> None:
    assert sorted(epoch_of(seed, epoch, size)) == list(range(size))


@given(seeds, st.integers(0, 10**12), sizes)
def test_equal_seeds_give_equal_orders_whatever_was_asked_before(seed: int, ordinal: int, size: int) -> None:
    first = task_index(seed, ordinal, size, shuffle=True)
    _permutation.cache_clear()
    assert task_index(seed, ordinal, size, shuffle=True) == first


@given(seeds, epochs)
def test_epochs_and_seeds_differ(seed: int, epoch: int) -> None:
    this = epoch_of(seed, epoch, 64)
    assert this != epoch_of(seed, epoch + 1, 64)
    assert this != epoch_of(seed + 1, epoch, 64)


@given(st.integers(0, 10**12), sizes)
def test_without_shuffle_tasks_come_in_their_own_order(ordinal: int, size: int) -> None:
    assert task_index(7, ordinal, size, shuffle=False) == ordinal % size


def test_the_order_stays_what_it_was_in_earlier_releases() -> None:
    """A restarted job must go on in the order that it began with, whatever was upgraded in between."""
    assert epoch_of(1, 0, 8) == [3, 5, 2, 7, 0, 6, 1, 4]


def test_positions_are_spread_evenly() -> None:
    """Over 2,000 seeds each of 5 tasks comes first about 400 times: a chi-square beyond 30 has a chance below 1 in 200,000."""
    counts = [0] * 5
    for seed in range(2000):
        counts[task_index(seed, 0, 5, shuffle=True)] += 1
    assert sum((count - 400) ** 2 / 400 for count in counts) < 30


@pytest.mark.parametrize(("seed", "ordinal", "size"), [(-1, 0, 1), (0, -1, 1), (0, 0, 0)])
def test_what_has_no_order_is_refused(seed: int, ordinal: int, size: int) -> None:
    with pytest.raises(ValueError, match="must"):
        task_index(seed, ordinal, size, shuffle=True)
