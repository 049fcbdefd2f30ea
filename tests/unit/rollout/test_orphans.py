"""The engine's processes end with the service, whichever way it goes; tried with small processes in their places."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from services.common.service.process_tree import is_running

ROOT = Path(__file__).parents[3]

WORKER = """
import time
from services.rollout.engine.process import watch_service
watch_service()
print("up", flush=True)
time.sleep(60)
"""
CORE = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {WORKER!r}]); time.sleep(60)"
SERVICE = f"""
import os, subprocess, sys, time
os.environ["MILLRACE_ROLLOUT_PID"] = str(os.getpid())
subprocess.Popen([sys.executable, "-c", {CORE!r}])
time.sleep(60)
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="Linux only")
def test_core_and_worker_end_with_a_killed_service() -> None:
    service = subprocess.Popen([sys.executable, "-c", SERVICE], cwd=ROOT, stdout=subprocess.PIPE)
    assert service.stdout is not None
    try:
        assert service.stdout.readline() == b"up\n"
        family = psutil.Process(service.pid).children(recursive=True)
        assert len(family) == 2
    finally:
        service.kill()
        service.wait()
        service.stdout.close()
    _, left = psutil.wait_procs(family, timeout=5)
    assert not any(map(is_running, left))


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="Linux only")
def test_a_worker_that_starts_after_the_service_ended_ends_at_once() -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    started = time.monotonic()
    environment = os.environ | {"MILLRACE_ROLLOUT_PID": str(dead.pid)}
    worker = subprocess.run([sys.executable, "-c", WORKER], cwd=ROOT, env=environment, timeout=30, check=False)
    assert worker.returncode == 1
    assert time.monotonic() - started < 20
