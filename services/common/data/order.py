"""Order in which tasks are issued: a pure function of seed and ordinal, so that a restart needs no state to continue."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt


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


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, size: int) -> npt.NDArray[np.uint32]:
    """The tasks of one epoch, uint32 [size].

    Sorts raw draws of Philox, keyed by (seed, epoch); draws that tie keep their order. NumPy guarantees the raw output of a bit generator
    across its versions, but not the result of `Generator.permutation`.
    """
    draws = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(size)
    order = np.argsort(draws, kind="stable").astype(np.uint32)
    order.flags.writeable = False
    return order
