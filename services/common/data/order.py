"""The order in which tasks are issued: a pure function of seed and ordinal, so that a restart needs no state to go on."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt


def task_index(seed: int, ordinal: int, size: int, shuffle: bool) -> int:
    """Which task the `ordinal`-th draw (from 0) of a dataset of `size` tasks is.

    Every epoch of `size` draws visits each task once; with `shuffle`, in an order of its own.

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

    Sorts raw draws of Philox, keyed by (seed, epoch). NumPy keeps a bit generator's raw output the same over its versions, which it
    does not promise of `Generator.permutation`; draws that tie keep their order.
    """
    draws = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(size)
    order = np.argsort(draws, kind="stable").astype(np.uint32)
    order.flags.writeable = False
    return order
