"""Orphans of a process are found and killed, whatever else runs on the machine."""

from __future__ import annotations

import subprocess
import sys

import pytest

LEFT = 24
"""Orphans, each with a child in another session."""

ORPHANAGE = f"""
import os, subprocess, sys, time
import psutil
from services.common.service import process_tree

def walk(*_, **__):
    raise AssertionError("it walks over all processes of the machine")

process_tree.adopt_orphans()
mine = subprocess.Popen(["/bin/sleep", "60"])
breeder = "import os, time\\nfor _ in range({LEFT}):\\n  if os.fork() == 0: os.setsid(); os.fork(); time.sleep(60)"
subprocess.run([sys.executable, "-S", "-c", breeder], check=True)
psutil.Process.children = walk
deadline, killed = time.monotonic() + 20, set()
while (orphans := process_tree.kill_orphans([mine.pid])) and time.monotonic() < deadline:
    killed |= orphans
    process_tree.reap_orphans([mine.pid])
    time.sleep(0.01)
print(len(killed) >= {LEFT}, mine.poll(), process_tree.child_pids(os.getpid()) == [mine.pid])
mine.kill()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")
def test_many_orphans_and_their_children_are_killed_without_a_walk_over_the_machines_processes() -> None:
    done = subprocess.run([sys.executable, "-c", ORPHANAGE], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["True", "None", "True"], done.stderr
