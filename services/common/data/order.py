"""Order in which tasks are issued: a pure function of seed and ordinal, so that a restart needs no state to continue."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import cast

import numpy as np
import numpy.typing as npt

_PART_TASKS = 2**21
"""Tasks that are drawn at once, and sorted at once as long as that makes few parts."""
_HUGE = 2**25
"""Tasks of an order that is made in fewer parts, since each part takes time for all draws."""


def task_index(seed: int, ordinal: int, size: int, shuffle: bool) -> int:
    """The index of the `ordinal`-th task (from 0) drawn from a dataset of `size` tasks.

    Every epoch of `size` draws takes each task once; with `shuffle`, in a different order per epoch.

    Raises:
        ValueError: a negative seed or ordinal, or an empty dataset.
    """
    if seed < 0 or ordinal < 0 or size < 1:
        raise ValueError(f"seed ({seed}) and ordinal ({ordinal}) must not be negative, size ({size}) must be positive")
    epoch, position = divmod(ordinal, size)
    return int(_permutation(seed, epoch, size)[position]) if shuffle else position


def next_indices(seed: int, ordinal: int, size: int, shuffle: bool, count: int) -> Sequence[int]:
    """The indices of the draws from `ordinal` on, `count` at the most, within the epoch. Raises as `task_index`."""
    task_index(seed, ordinal, size, shuffle)
    epoch, position = divmod(ordinal, size)
    if shuffle:
        return cast("Sequence[int]", _permutation(seed, epoch, size)[position : position + count])
    return range(position, min(position + count, size))


@lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, size: int) -> npt.NDArray[np.uint32]:
    """The tasks of one epoch, uint32 [size].

    Sorts raw draws of Philox, keyed by (seed, epoch); draws that tie keep their order. NumPy guarantees the raw output of a bit generator
    across its versions, but not the result of `Generator.permutation`. A large epoch is sorted in parts, each the draws between two bounds,
    so that it takes little more memory than its result: the draws are made again for each part, which costs less than the sort.
    """
    parts = min(-(-size // _PART_TASKS), 8 if size < _HUGE else 3)
    bounds = [(2**64 * part) // parts for part in range(parts)] + [2**64]
    order, filled = np.empty(size, np.uint32), 0
    for low, high in pairwise(bounds):
        draws, tasks = _draws_between(seed, epoch, size, low, high)
        order[filled : filled + len(tasks)] = tasks[np.argsort(draws, kind="stable")]
        filled += len(tasks)
    order.flags.writeable = False
    return order


def _draws_between(
    seed: int, epoch: int, size: int, low: int, high: int
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint32]]:
    """The draws within low ≤ draw < high, and their tasks, in the order of the tasks; uint64 and uint32 of the same length."""
    generator = np.random.Philox(key=np.array([seed, epoch], np.uint64))
    draws, tasks = [], []
    for start in range(0, size, _PART_TASKS):
        made = generator.random_raw(min(_PART_TASKS, size - start))
        chosen = np.flatnonzero((made >= np.uint64(low)) & (made <= np.uint64(high - 1)))
        draws.append(made[chosen])
        tasks.append((chosen + start).astype(np.uint32))
    return np.concatenate(draws), np.concatenate(tasks)
