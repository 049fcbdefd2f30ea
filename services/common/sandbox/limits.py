"""Limits of a child process (time, memory, files, output), and how the child applies them to itself."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import resource
import time
from dataclasses import dataclass

import psutil

MIB = 1024 * 1024
CPU_MARGIN_S = 2.0
"""CPU seconds beyond a request's wall-clock limit after which the kernel ends the child, in case no parent is left to kill it."""
MAX_FILE_BYTES = 64 * MIB
"""Largest file that a child may write: its work needs none."""
LOG_BYTES = 1 * MIB
"""Most log lines that one child may write: more would fill the service's log."""
NICENESS = 10
"""Of a child that runs at a lower priority than the services."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a child. Example: Limits(wall_s=20.0, memory_mib=1024)."""

    wall_s: float
    """Wall-clock seconds of one request, the making of the object included; a request may name another."""
    memory_mib: int = 2048
    """Address space beyond that at birth."""
    reply_bytes: int = 64 * MIB
    """Longest reply."""
    low_priority: bool = False
    """Whether it runs at a lower priority than the services."""
    threads: int = 1
    """Threads that compute at once: so many times the wall-clock limit is the processor time of a request."""


def limit_child(memory_mib: int, *, low_priority: bool) -> None:
    """Limits this process for good: memory beyond what it has, files, core dumps, priority."""
    most = psutil.Process().memory_info().vms + memory_mib * MIB
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, MAX_FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if low_priority:
        os.nice(NICENESS)


def limit_memory(mib: int) -> None:
    """Limits the whole address space of this process; the soft limit only, since the next request may have another."""
    with contextlib.suppress(ValueError):  # more is in use already than allowed: the next allocation fails
        resource.setrlimit(resource.RLIMIT_AS, (mib * MIB, resource.RLIM_INFINITY))


def limit_cpu(cpu_s: float) -> None:
    """Makes the kernel end this process when a request has used more processor time than `cpu_s`, and the margin."""
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = math.ceil(time.process_time() + cpu_s + CPU_MARGIN_S)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


class BoundedLog:
    """Stream of a log handler that writes up to LOG_BYTES, and notes in its last line that it stops."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._left = descriptor, LOG_BYTES

    def write(self, text: str) -> None:
        """Writes whole lines."""
        if self._left <= 0:
            return
        line = text.encode(errors="replace")
        self._left -= len(line)
        os.write(self._descriptor, line if self._left > 0 else b"(further lines of this process are left out)\n")

    def flush(self) -> None:
        """Does nothing: `write` has no buffer."""


def limit_output() -> None:
    """Discards this process's standard output and error for good, foreign prints included; its log handlers keep a bounded log."""
    log = BoundedLog(os.dup(2))
    null = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(null, descriptor)
    os.close(null)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(log)
