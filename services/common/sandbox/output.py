"""Output of a child process: its log lines, up to a bound. What foreign code prints goes nowhere: it would fill the service's log."""

from __future__ import annotations

import logging
import os

LOG_BYTES = 1024 * 1024
"""Of log lines that one child may write."""


class BoundedLog:
    """Stream of a log handler that stops at its bound, and says so in its last line."""

    def __init__(self, descriptor: int, size: int = LOG_BYTES) -> None:
        """`descriptor`: of the log, kept as long as the process lives; `size`: bytes."""
        self._descriptor = descriptor
        self._left = size

    def write(self, text: str) -> None:
        """Writes whole lines."""
        if self._left <= 0:
            return
        line = text.encode(errors="replace")
        self._left -= len(line)
        os.write(self._descriptor, line if self._left > 0 else b"(further lines of this process are left out)\n")

    def flush(self) -> None:
        """Nothing waits."""


def mute() -> None:
    """Points this process's standard output and error to nowhere, for good; its log handlers go on writing where they did."""
    log = BoundedLog(os.dup(2))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)
    os.close(nowhere)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(log)
