"""A stand-in for a service: answers /readyz and /healthz, notes when it is asked to stop, and has a child in a session of its own.

Usage: stand_in.py NAME PORT NOTES DRAIN_S MODE, with MODE one of `good`, `quick` (dies at once), `wrong` (ends with code 2),
`deaf` (ignores SIGTERM), `unready`, `orphans` (a process below it outlives its parent for a moment), `litter` (it leaves a file in its
TMPDIR, and shared memory that nobody sees to). It dies at once too while the file NOTES.broken-NAME is there, with code 2 while
NOTES.refuses-NAME is, and is not ready while NOTES.sleeps-NAME is.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from prometheus_client import CollectorRegistry

from services.common.health import HealthServer


def main() -> None:
    name, port, notes, drain_s, mode = sys.argv[1:]
    asked: list[int] = []  # a handler must not set an Event that its own thread may be about to wait for

    def note(what: str) -> None:
        with Path(notes).open("a") as file:
            file.write(f"{what} {name} {os.getpid()}\n")

    note("start")
    refuses = mode == "wrong" or Path(f"{notes}.refuses-{name}").exists()
    if refuses or mode == "quick" or Path(f"{notes}.broken-{name}").exists():
        sys.stderr.write(f"{name} says why\n")
        sys.exit(2 if refuses else 1)
    signal.signal(signal.SIGTERM, (lambda *_: note("deaf")) if mode == "deaf" else (lambda *_: asked.append(1)))
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    note(f"helper={helper.pid}")
    if mode == "orphans":
        made = subprocess.run(["sh", "-c", "sleep 1 >/dev/null & echo $!"], capture_output=True, text=True, check=True)
        note(f"orphan={int(made.stdout)}")
    if mode == "litter":
        Path(tempfile.mkdtemp(), "file").write_text(name)
        segment = SharedMemory(create=True, size=4096)
        resource_tracker.unregister(f"/{segment.name}", "shared_memory")
        note(f"segment={segment.name}")
    sick, sleeps = Path(f"{notes}.sick-{name}"), Path(f"{notes}.sleeps-{name}")
    HealthServer(
        "127.0.0.1",
        int(port),
        healthy=lambda: "sick" if sick.exists() else None,
        ready=lambda: "not yet" if mode == "unready" or sleeps.exists() else None,
        registry=CollectorRegistry(),
    ).start()
    while not asked:
        time.sleep(0.02)
    note("term")
    time.sleep(float(drain_s))
    helper.kill()
    note("end")


if __name__ == "__main__":
    main()
