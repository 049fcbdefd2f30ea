"""Limits of a child process, and how it takes them on."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import time
from dataclasses import dataclass

import psutil

MIB = 1024 * 1024
CPU_MARGIN_S = 2.0
"""CPU seconds beyond a request's wall-clock limit after which the kernel ends the child, should nobody be left to kill it."""
MAX_FILE_BYTES = 64 * MIB
"""Largest file that a child may write: it has no business with any."""
NICENESS = 10
"""A child that makes way for the services beside it runs at this."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a child may use.

    Example: Limits(wall_s=20.0, memory_mib=1024)
    """

    wall_s: float
    """Wall-clock seconds of one request, unless the request says otherwise; its making included."""
    memory_mib: int = 2048
    """Address space beyond what it has at birth."""
    reply_bytes: int = 64 * MIB
    """Longest answer."""
    makes_way: bool = False
    """Whether it runs at a lower priority than the services."""


def limit_child(memory_mib: int, *, makes_way: bool) -> None:
    """Caps what this process may take from now on, for good: memory beyond what it has, files, core dumps."""
    most = psutil.Process().memory_info().vms + memory_mib * MIB
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, MAX_FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if makes_way:
        os.nice(NICENESS)


def limit_memory(mib: int) -> None:
    """Caps the whole address space of this process; the soft limit only, since each request may have another."""
    with contextlib.suppress(ValueError):  # more is in use already than it may have: the next allocation fails
        resource.setrlimit(resource.RLIMIT_AS, (mib * MIB, resource.RLIM_INFINITY))


def limit_cpu(wall_s: float) -> None:
    """Lets the kernel end this process when a request of `wall_s` seconds has computed for longer."""
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = math.ceil(time.process_time() + wall_s + CPU_MARGIN_S)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))
