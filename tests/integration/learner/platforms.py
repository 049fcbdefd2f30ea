"""The platform that the tests' ranks compute on: the CPU, or with MILLRACE_TEST_PLATFORM=cuda a GPU, which is one rank's."""

from __future__ import annotations

import os
from collections.abc import Mapping

from services.common.config.settings import Platform

PLATFORM = Platform(os.environ.get("MILLRACE_TEST_PLATFORM", Platform.CPU.value))
ON_CPU = PLATFORM is Platform.CPU
RANKS = (1, 2, 4) if ON_CPU else (1,)
"""Numbers of ranks that can be run: NCCL takes one rank a device."""


def runnable(layouts: Mapping[str, int]) -> dict[str, int]:
    """Those of the layouts, with their ranks, that can be run."""
    return {name: ranks for name, ranks in layouts.items() if ranks in RANKS}
