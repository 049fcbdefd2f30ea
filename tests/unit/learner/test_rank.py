"""How a rank ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from services.learner.storage.folder import ERROR_FILE

END_S = 10.0
"""A process that starts and fails, on a busy machine; a thread of its own holds it for a minute if it is let."""

FAILING = """
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from services.learner import rank

def run_rank(job_id, settings):
    serving = Event()
    ThreadPoolExecutor().submit(lambda: (serving.set(), Event().wait(60.0)))
    serving.wait()
    raise ConnectionError("another rank is gone")

rank.run_rank = run_rank
rank.main()
"""


def test_a_rank_that_fails_ends_at_once_whatever_its_threads_wait_for(tmp_path: Path) -> None:
    folder = tmp_path / "jobs" / "some-1234abcd"
    folder.mkdir(parents=True)
    environment = {**os.environ, "MILLRACE_HOME": str(tmp_path), "MILLRACE_JOB": folder.name, "RANK": "0"}
    started = time.monotonic()
    command = [sys.executable, "-c", FAILING]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1, ended.stderr
    assert time.monotonic() - started < END_S
    assert (folder / ERROR_FILE).read_text() == "rank 0: ConnectionError: another rank is gone"
    assert "rank 0 failed" in ended.stdout + ended.stderr


TAKING = """
import os, sys
from services.learner.rank import take_cores
os.sched_setaffinity(0, [max(os.sched_getaffinity(0))])
take_cores(int(sys.argv[1]))
print(len(os.sched_getaffinity(0)))
"""


@pytest.mark.parametrize(("threads", "in_stack", "taken"), [(1, True, 1), (2, True, 2), (2, False, 1)])
def test_ranks_with_more_threads_than_cores_take_those_of_the_stack(threads: int, in_stack: bool, taken: int) -> None:
    cores = sorted(os.sched_getaffinity(0))[-2:]
    environment = dict(os.environ) | ({"MILLRACE_STACK_CORES": ",".join(map(str, cores))} if in_stack else {})
    command = [sys.executable, "-c", TAKING, str(threads)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert int(ended.stdout) == min(taken, len(cores))
