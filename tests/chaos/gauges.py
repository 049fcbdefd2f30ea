"""What a running stack takes up: memory, open files, threads, shared memory, temporary files, Redis and disk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import redis as sync_redis

from services.common.service.process_tree import family
from services.common.service.stack_state import UpState

MIB = 1024**2
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  looked at, not written to
SUPERVISOR = "supervisor"

Figures = dict[tuple[str, str], float]
"""(service, quantity) → value; sizes in MiB."""


def look(home: Path, state: UpState, temporary: Path) -> Figures:
    """All figures at this moment; those of a process that is being started are left out.

    Args:
        home: of the stack.
        state: what its supervisor says of its processes.
        temporary: where its processes put temporary files.
    """
    figures: Figures = {}
    roots = {name: process.pid for name, process in state.processes.items()}
    for name, pid in roots.items():
        figures |= {(name, quantity): value for quantity, value in _of_processes(family(pid)).items()}
    with contextlib.suppress(psutil.Error):
        figures |= {
            (SUPERVISOR, quantity): value for quantity, value in _of_processes([psutil.Process(state.pid)]).items()
        }
    with (
        contextlib.suppress(sync_redis.RedisError),
        sync_redis.Redis.from_url(state.redis_url, socket_timeout=5.0) as client,
    ):
        figures["redis", "used memory, MiB"] = int(client.info("memory")["used_memory"]) / MIB
        figures["redis", "keys"] = float(client.dbsize())
    figures["home", "disk, MiB"] = taken(home) / MIB
    figures["home", "temporary files, MiB"] = taken(temporary) / MIB
    figures["home", "temporary files"] = float(sum(1 for _ in temporary.rglob("*")))
    figures["machine", "shared memory, MiB"] = taken(SHARED_MEMORY) / MIB
    return figures


def _of_processes(processes: list[psutil.Process]) -> Mapping[str, float]:
    """Of a service: its process and all below it."""
    sums = {"memory, MiB": 0.0, "open files": 0.0, "threads": 0.0, "processes": 0.0}
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            memory = _proportional_bytes(process.pid) / MIB
            files, threads = process.num_fds(), process.num_threads()
            for quantity, value in zip(sums, (memory, files, threads, 1), strict=True):
                sums[quantity] += value
    return sums


def _proportional_bytes(pid: int) -> int:
    """A process's own memory and its share of what it has in common with others (PSS)."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def taken(folder: Path) -> int:
    """Bytes on the disk that a directory's files take, those of sparse files that are there."""
    return sum(_blocks(folder))


def _blocks(folder: Path) -> Iterator[int]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    yield from _blocks(Path(entry.path))
                else:
                    yield entry.stat(follow_symlinks=False).st_blocks * 512
