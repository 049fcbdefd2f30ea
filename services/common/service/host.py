"""Host of a process: its boot, its processors, its memory and the limit of its container, and the packages that are installed."""

from __future__ import annotations

import ctypes
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

CGROUP = Path("/sys/fs/cgroup")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
CPU_INFO = Path("/proc/cpuinfo")
BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""The last one is Arm's."""
MEMORY_FILES = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
"""Limit and usage in a control group, of version 2 and of version 1."""
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""Parameters of glibc's mallopt, as <malloc.h> numbers them."""


class ContainerMemory(NamedTuple):
    """Memory of a control group, bytes."""

    limit: int
    free: int


def boot_id() -> str:
    """Id of the running kernel's boot: equal in all processes and containers of a host, new after a restart. "" where there is none."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


def container_memory(cgroup: Path = CGROUP) -> ContainerMemory | None:
    """The memory limit of the container, and what is left of it; None where there is no limit."""
    for limit_file, usage_file in MEMORY_FILES:
        limit = _bytes(cgroup / limit_file)
        if limit is not None:
            return ContainerMemory(limit, max(0, limit - (_bytes(cgroup / usage_file) or 0)))
    return None


def keep_freed_memory() -> None:
    """Lets glibc keep what this process frees, for what it needs next; else it asks the kernel for every page anew.

    A step of training or a load of weights allocates and frees gigabytes, and a page that another process has taken meanwhile costs
    8 µs. From then on the process holds as much as it has ever needed. Other C libraries have their way.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)


def multiplies_bfloat16(cpuinfo: Path = CPU_INFO) -> bool:
    """Whether this machine's processors have instructions that multiply bfloat16."""
    try:
        words = set(cpuinfo.read_text().split())
    except OSError:
        return False
    return not words.isdisjoint(BFLOAT16_FLAGS)


def installed_version(package: str) -> str | None:
    """The version of an installed package, or None. Imports nothing."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _bytes(file: Path) -> int | None:
    """The number in a control group's file; None where there is no such file, or no limit ("max")."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
