"""Cores, memory and disk room of this machine, as far as this process may use them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import psutil

from services.cli.checks.finding import Finding, Subject, ok, problem, warning
from services.cli.stack.cores import available_cores

GIB = 1024**3
LEAST_MEMORY, FAIR_MEMORY = 2 * GIB, 6 * GIB
"""Below the first the demo's services do not even start; below the second they are soon cramped."""
FAIR_DISK = 10 * GIB
"""Less is soon full of checkpoints; how little is too little is a setting."""
_CGROUP = Path("/sys/fs/cgroup")
_LIMITS = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))


def check_cores(_: Subject) -> list[Finding]:
    """Whether learner and rollout servers can have cores of their own."""
    cores = len(available_cores())
    if cores >= 2:
        return [ok("cores", f"{cores} cores")]
    return [
        warning("cores", f"{cores} core", "learner and rollout servers will share it: give this machine two or more")
    ]


def check_memory(_: Subject) -> list[Finding]:
    """Memory that is free for new processes, within the container's limit where there is one."""
    free = available_memory()
    found = f"{free / GIB:.1f} GiB free of {psutil.virtual_memory().total / GIB:.1f} GiB"
    remedy = f"end other processes or raise the container's limit: at least {LEAST_MEMORY / GIB:.0f} GiB, better {FAIR_MEMORY / GIB:.0f}"
    if free < LEAST_MEMORY:
        return [problem("memory", found, remedy)]
    return [warning("memory", found, remedy) if free < FAIR_MEMORY else ok("memory", found)]


def check_disk(subject: Subject) -> list[Finding]:
    """Room and write permission where the home is, or will be."""
    folder = _nearest(subject.home)
    if not os.access(folder, os.W_OK | os.X_OK):
        return [problem("disk", f"{folder} is not writable", "choose another directory with --home (MILLRACE_HOME)")]
    free = shutil.disk_usage(folder).free
    found = f"{free / GIB:.1f} GiB free at {subject.home}"
    remedy = f"make room there or choose another --home: checkpoints need {FAIR_DISK / GIB:.0f} GiB and more"
    if free < subject.settings.min_free_gib * GIB:
        return [problem("disk", found, remedy)]
    return [warning("disk", found, remedy) if free < FAIR_DISK else ok("disk", found)]


def available_memory(cgroup: Path = _CGROUP) -> int:
    """Bytes that new processes may take without swapping."""
    free = int(psutil.virtual_memory().available)
    for limit, usage in _LIMITS:
        try:
            room = int((cgroup / limit).read_text()) - int((cgroup / usage).read_text())
        except (OSError, ValueError):
            continue  # no such file, or `max`: no limit
        free = min(free, max(0, room))
    return free


def _nearest(path: Path) -> Path:
    """The path itself, or the directory above it that exists."""
    return next(folder for folder in (path, *path.parents) if folder.exists())
