"""Measured processes: their end, their errors and their memory."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from benchmarks.peers.processes import Child, PeakMemory, SideError, last_line
from services.common.service.process_tree import is_running

MIB = 1 << 20


def child(tmp_path: Path, code: str, limit_s: float = 30.0) -> Child:
    return Child([sys.executable, "-c", code], tmp_path / "side.log", limit_s, {"SIDE": "one"})


def test_a_side_that_fails_is_an_error_with_the_last_line_of_its_log(tmp_path: Path) -> None:
    code = "print('a line', flush=True); raise ValueError('no such model')"
    with child(tmp_path, code) as side, pytest.raises(SideError, match="side ended with 1: ValueError: no such model"):
        assert list(side.lines()) == ["a line"]


def test_a_side_that_hangs_is_ended_in_time(tmp_path: Path) -> None:
    with (
        child(tmp_path, "import time; time.sleep(60)", limit_s=0.5) as side,
        pytest.raises(SideError, match="took more"),
    ):
        list(side.lines())


def test_nothing_is_left_when_the_measurement_is_interrupted(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
        "print(p.pid, flush=True); time.sleep(60)"
    )
    pids: list[int] = []

    def interrupted() -> None:
        with child(tmp_path, code) as side:
            pids.extend([side.pid, int(next(side.lines()))])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    deadline = time.monotonic() + 10
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, pids))


def test_the_memory_of_descendants_counts(tmp_path: Path) -> None:
    grandchild = f"x = bytes({64 * MIB}) ; x = bytearray(x); import time; time.sleep(30)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}])"
    with child(tmp_path, code) as side, PeakMemory(side.pid) as memory:
        deadline = time.monotonic() + 20
        while memory.peak_bytes < 64 * MIB and time.monotonic() < deadline:
            time.sleep(0.1)
    assert memory.peak_bytes >= 64 * MIB


def test_the_last_line_is_one_with_text(tmp_path: Path) -> None:
    log = tmp_path / "side.log"
    assert last_line(log) == "there is no side.log"
    log.write_text("first\n  last \n\n")
    assert last_line(log) == "last"


def test_a_child_has_the_variables_that_are_given(tmp_path: Path) -> None:
    with child(tmp_path, "import os; print(os.environ['SIDE'], os.environ['HF_HUB_OFFLINE'])") as side:
        assert list(side.lines()) == ["one 1"]
    assert "SIDE" not in os.environ
