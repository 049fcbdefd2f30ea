"""A full disk under the job's folder, or under Redis: the job says so, loses nothing, and goes on when there is room again."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.chaos.campaign import campaign
from tests.chaos.faults import Options
from tests.chaos.result import Result

SIZE_MIB = 96
FULL_S = 20.0
WORDS = ("space", "room", "full", "MISCONF")
"""One of these is in the cause of a job that waits for space."""
_BLOCK = bytes(64 * 1024)


def full(options: Options) -> Result:
    """A small file system below `jobs` (journal and checkpoints) or `redis` is filled for some seconds, `count` times."""
    folder = options.home / "stack" / options.target
    with (
        mounted(folder),
        campaign(options.home / "stack", f"disk full below {options.target}", options.seed) as running,
    ):
        said: set[str] = set()

        def strike() -> None:
            ballast, causes = folder / "ballast", set()
            fill(ballast)
            deadline = time.monotonic() + FULL_S
            while time.monotonic() < deadline:
                record = running.stack.job(running.job_id)
                if record is not None and record["cause"]:
                    causes.add(f"{record['state']}: {record['cause']}")
                fill(ballast)
                time.sleep(0.2)
            ballast.unlink()
            if not any(word in cause for cause in causes for word in WORDS):
                running.result.violations.append(
                    f"the job never said that the disk is full; it said {sorted(causes)[:3]}"
                )
            said.update(causes)

        for _ in range(options.count):
            running.trial(strike)
        running.result.extra["said"] = sorted(said)[:3]
        running.finish()
    return running.result


@contextlib.contextmanager
def mounted(folder: Path, size_mib: int = SIZE_MIB) -> Iterator[None]:
    """A file system of its own, in memory.

    Raises:
        CalledProcessError: this process may not mount one (it takes root).
    """
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "tmpfs", str(folder)], check=True, timeout=10)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=10)


def fill(path: Path) -> None:
    """Appends until nothing more goes in."""
    with path.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(_BLOCK) == len(_BLOCK):
            pass
    with path.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while os.write(file.fileno(), b"x" * 512) == 512:
            pass
