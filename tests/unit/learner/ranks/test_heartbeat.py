"""The heartbeat of the ranks: the one that hangs is killed, and no other; the ranks are real processes that train nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.common.service import process_tree, watchdog
from services.common.service.process_tree import is_running
from services.learner.ranks.heartbeat import RanksWatchdog

RANK = """
import os, sys, time
from pathlib import Path
from services.common.service.process_tree import die_with_parent
from services.learner.ranks import heartbeat
die_with_parent()
heartbeat.BEAT_S = 0.1
if sys.argv[3] == "good":
    heartbeat.beat_forever(Path(sys.argv[1]), f"rank {sys.argv[2]}", os.getpid())
elif sys.argv[3] == "mute":
    (Path(sys.argv[1]) / f"rank {sys.argv[2]}").write_text(f"{os.getpid()} 0")
while True:
    time.sleep(0.01) if sys.argv[3] != "mute" else sum(range(10000))
"""
LAUNCHER = """
import subprocess, sys
ranks = [subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2], str(n), kind]) for n, kind in enumerate(sys.argv[3:])]
for rank in ranks:
    rank.wait()
"""

Launch = Callable[..., tuple[RanksWatchdog, int]]


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    monkeypatch.setattr(watchdog, "PERIOD_S", 2.0)
    monkeypatch.setattr(watchdog, "IDLE_S", 1.0)
    started: list[subprocess.Popen[bytes]] = []

    def begin(*kinds: str) -> tuple[RanksWatchdog, int]:
        watch = RanksWatchdog(tmp_path)
        process = subprocess.Popen([sys.executable, "-c", LAUNCHER, RANK, str(tmp_path), *kinds])
        started.append(process)
        deadline = time.monotonic() + 30
        while len(list(tmp_path.glob("rank *"))) < len(kinds) - kinds.count("late"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return watch, process.pid

    yield begin
    for process in started:
        for relative in process_tree.family(process.pid):
            relative.kill()
        process.wait()


def looks(watch: RanksWatchdog, launcher: int, seconds: float) -> list[str]:
    """What was killed within so many seconds."""
    until = time.monotonic() + seconds
    hung: list[str] = []
    while not hung and time.monotonic() < until:
        hung = watch.check(launcher)
        time.sleep(0.1)
    return hung


def test_ranks_that_beat_are_left_alone(launch: Launch) -> None:
    watch, launcher = launch("good", "good")
    assert looks(watch, launcher, 4.0) == []
    assert len(process_tree.family(launcher)) == 3


def test_a_stopped_rank_is_killed_and_no_other(launch: Launch, tmp_path: Path) -> None:
    watch, launcher = launch("good", "good")
    looks(watch, launcher, 0.5)
    pid = int((tmp_path / "rank 1").read_text().split()[0])
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    (fault,) = looks(watch, launcher, 10.0)
    assert fault.startswith("rank 1 hangs: no heartbeat for 2 s, and process")
    assert time.monotonic() - began < 2 * watchdog.PERIOD_S
    deadline = time.monotonic() + 5
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert looks(watch, launcher, 1.0) == []


def test_a_rank_that_computes_without_a_beat_has_a_longer_limit(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, launcher = launch("mute")
    assert looks(watch, launcher, 4.0) == []
    monkeypatch.setattr(watchdog, "BUSY_S", 1.0)
    (fault,) = looks(watch, launcher, 4.0)
    assert fault.startswith("rank 0 hangs: no heartbeat for")


def test_a_stopped_launcher_is_killed(launch: Launch) -> None:
    watch, launcher = launch("good")
    os.kill(launcher, signal.SIGSTOP)
    assert looks(watch, launcher, 10.0) == [f"torchelastic hangs: process {launcher} is stopped"]


def test_a_rank_that_is_stopped_before_its_first_beat_ends_the_launcher(launch: Launch) -> None:
    watch, launcher = launch("good", "late")
    (late,) = (p for p in process_tree.family(launcher) if p.cmdline()[-1] == "late" and p.pid != launcher)
    late.suspend()
    assert looks(watch, launcher, 10.0) == [f"torchelastic hangs: process {late.pid} is stopped"]
    late.wait(5)


def test_a_watchdog_that_was_held_up_itself_kills_nobody(launch: Launch, tmp_path: Path) -> None:
    watch, launcher = launch("good")
    looks(watch, launcher, 0.5)
    pid = int((tmp_path / "rank 0").read_text().split()[0])
    os.kill(pid, signal.SIGSTOP)
    time.sleep(5.0)
    assert watch.check(launcher) == []
    os.kill(pid, signal.SIGCONT)
    assert looks(watch, launcher, 2.0) == []
