"""Engine processes must not outlive the service, however it ends: vLLM leaves them running when their parent is killed.

vLLM starts its processes itself, so the kernel cannot be asked from their first instruction on. The worker, which loads our
extension, watches the service instead, and takes the engine's core process (its parent) with it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading

import psutil

SERVICE_PID = "MILLRACE_ROLLOUT_PID"
"""Environment variable that names the service's process to the engine's."""


def watch_service() -> None:
    """Ends this process, and the engine's core process above it, when the service has ended. Linux only; elsewhere it does nothing."""
    name = os.environ.get(SERVICE_PID)
    if name is None or not hasattr(os, "pidfd_open"):
        return
    service, parent = int(name), os.getppid()
    try:
        watched = os.pidfd_open(service)
        core = parent if parent != service and psutil.Process(parent).ppid() == service else None
    except (ProcessLookupError, psutil.NoSuchProcess):
        os._exit(1)  # it has ended already; the core process notices that its worker is gone
    threading.Thread(target=_wait, args=(watched, core), name="service-watch", daemon=True).start()


def _wait(watched: int, core: int | None) -> None:
    select.select([watched], [], [])  # a process's descriptor is readable once it has ended
    if core is not None and os.getppid() == core:
        with contextlib.suppress(ProcessLookupError):
            os.kill(core, signal.SIGKILL)
    os._exit(1)
