"""Usage of processor and memory by families of processes, for the accounts of a benchmark."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Usage:
    """Of one family of processes, up to now."""

    cpu_s: float
    """Of all its processes, those that have ended too."""
    rss_bytes: int
    """Pages that several processes share count in each."""

    def __sub__(self, before: Usage) -> float:
        """Processor seconds since then."""
        return self.cpu_s - before.cpu_s


def usage_of(processes: list[psutil.Process]) -> Usage:
    """Sum of the processes' own times and those of the children that they have waited for."""
    cpu_s, rss = 0.0, 0
    for process in processes:
        try:
            times = process.cpu_times()
            cpu_s += times.user + times.system + times.children_user + times.children_system
            rss += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return Usage(cpu_s, rss)


def family(pid: int) -> list[psutil.Process]:
    """A process and all below it."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def usages(roots: Mapping[str, list[int]], apart: Mapping[str, str]) -> dict[str, Usage]:
    """Usage of each family, by its name. `apart`: name → module of a process that counts under this name wherever it is."""
    found: dict[str, list[psutil.Process]] = {name: [] for name in (*roots, *apart)}
    for name, pids in roots.items():
        for process in (relative for pid in pids for relative in family(pid)):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                line = " ".join(process.cmdline())
                found[next((other for other, module in apart.items() if module in line), name)].append(process)
    return {name: usage_of(processes) for name, processes in found.items()}
