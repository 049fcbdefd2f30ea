"""Sources whose tasks misbehave, made in a child by the tests of `JobData`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from typing import Any

from services.common.data.record import TaskRecord
from services.common.streams.types import Message
from services.learner.groups.sources import Sources

RAISES, HANGS, CRASHES = 5, 17, 30


class Odd:
    """Task i asks i; one raises, one never comes, one takes its process along."""

    fingerprint = "odd"

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> TaskRecord:
        if index == RAISES:
            raise ZeroDivisionError("division\nby zero")
        if index == HANGS:
            time.sleep(600)
        if index == CRASHES:
            os.kill(os.getpid(), signal.SIGSEGV)
        return TaskRecord((Message("user", str(index)),), "odd", str(index), {"index": index})

    def expect(self, indices: Sequence[int]) -> None:
        """Nothing."""


class OddSources(Sources):
    """Those of a job whose every source is odd."""

    def __init__(self, spec: str, settings: dict[str, Any], check_s: float) -> None:
        super().__init__(spec, settings, check_s)
        self.__dict__["train"] = self.__dict__["eval"] = Odd()
