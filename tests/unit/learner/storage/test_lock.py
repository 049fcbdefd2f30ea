"""Two processes never write one job's folder at once."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from services.learner.storage.folder import LOCK_FILE
from services.learner.storage.lock import FolderLock, FolderTaken

HOLDER = """
import subprocess, sys, time, os
from pathlib import Path
from services.learner.storage.lock import FolderLock
lock = FolderLock.take(Path(sys.argv[1]))
if sys.argv[2] == "exec":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], close_fds=False).pid
elif sys.argv[2] == "fork":
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
else:
    child = 0
print(child, flush=True)
time.sleep(60)
"""


def test_a_second_lock_is_refused_in_time_and_names_who_has_the_first(tmp_path: Path) -> None:
    with FolderLock.take(tmp_path):
        started = time.monotonic()
        with pytest.raises(FolderTaken, match=rf"{tmp_path} is still written by process {os.getpid()} on "):
            FolderLock.take(tmp_path, wait_s=0.3)
        assert 0.3 <= time.monotonic() - started < 5
    (FolderLock.take(tmp_path, wait_s=0)).release()


def test_a_lock_that_was_released_twice_takes_nothing_from_the_next_one(tmp_path: Path) -> None:
    first = FolderLock.take(tmp_path)
    first.release()
    with FolderLock.take(tmp_path, wait_s=0):
        first.release()
        with pytest.raises(FolderTaken):
            FolderLock.take(tmp_path, wait_s=0)


def hold_elsewhere(folder: Path, child: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", HOLDER, str(folder), child], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("child", ["none", "exec", "fork"])
def test_the_lock_dies_with_its_process_whatever_children_it_leaves(tmp_path: Path, child: str) -> None:
    holder = hold_elsewhere(tmp_path, child)
    left = 0
    try:
        assert holder.stdout is not None
        left = int(holder.stdout.readline())
        with pytest.raises(FolderTaken, match=f"process {holder.pid} on"):
            FolderLock.take(tmp_path, wait_s=0.3)
        holder.kill()
        holder.wait()
        if left:
            os.kill(left, 0)  # it is there
        with FolderLock.take(tmp_path, wait_s=5):
            assert f"process {os.getpid()} on" in (tmp_path / LOCK_FILE).read_text()
    finally:
        holder.kill()
        holder.wait()
        if left:
            os.kill(left, signal.SIGKILL)


def test_a_holder_that_was_replaced_and_stands_still_is_killed(tmp_path: Path) -> None:
    holder = hold_elsewhere(tmp_path, "none")
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        holder.send_signal(signal.SIGSTOP)
        with pytest.raises(FolderTaken):
            FolderLock.take(tmp_path, wait_s=0.5)
        with FolderLock.take(tmp_path, wait_s=10, kill_after_s=0.2):
            assert holder.wait(5) == -signal.SIGKILL
    finally:
        holder.kill()
        holder.wait()


def test_a_lock_of_this_process_is_waited_for_but_never_costs_its_life(tmp_path: Path) -> None:
    with FolderLock.take(tmp_path), pytest.raises(FolderTaken):
        FolderLock.take(tmp_path, wait_s=0.5, kill_after_s=0.1)


def test_a_process_that_the_file_names_wrongly_is_left_alone(tmp_path: Path) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        with FolderLock.take(tmp_path):
            (tmp_path / LOCK_FILE).write_text(f"process {bystander.pid} on {socket.gethostname()}")
            with pytest.raises(FolderTaken):
                FolderLock.take(tmp_path, wait_s=0.5, kill_after_s=0.1)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
