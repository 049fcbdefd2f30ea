"""deploy/docker/stopped.sh, in a process namespace of its own as a container has: elsewhere it would see, and end, what is not ours."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from services.common.service.process_tree import is_running

SCRIPT = Path(__file__).parents[3] / "deploy/docker/stopped.sh"
OWN = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc")
INIT = """
sleep 600 &
while read -r check; do sh "$check" echo checked; done
"""


@dataclass(frozen=True)
class Container:
    """An init that runs a health check for every line that it is given, and its one child."""

    outer: subprocess.Popen[str]
    log: Path

    @property
    def init(self) -> psutil.Process:
        (found,) = psutil.Process(self.outer.pid).children()
        return found

    @property
    def service(self) -> psutil.Process:
        return next(child for child in self.init.children() if "sleep" in child.cmdline())

    def check(self) -> None:
        """One health check; returns when its own check has run."""
        assert self.outer.stdin is not None
        assert self.outer.stdout is not None
        self.outer.stdin.write(f"{SCRIPT}\n")
        self.outer.stdin.flush()
        assert self.outer.stdout.readline() == "checked\n", self.log.read_text()


@pytest.fixture
def container(tmp_path: Path) -> Iterator[Container]:
    if subprocess.run([*OWN, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody make process namespaces")
    log = tmp_path / "log"
    with log.open("w") as errors:
        outer = subprocess.Popen(
            [*OWN, "sh", "-c", INIT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
            env=os.environ | {"TMPDIR": str(tmp_path)},
        )  # fmt: skip
    made = Container(outer, log)
    until(lambda: is_up(made))
    yield made
    outer.kill()
    outer.wait()


def is_up(container: Container) -> bool:
    try:
        return is_running(container.service)
    except (ValueError, StopIteration, psutil.Error):
        return False


def stop(process: psutil.Process) -> None:
    process.send_signal(signal.SIGSTOP)
    until(lambda: process.status() == psutil.STATUS_STOPPED)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_process_that_runs_is_left_alone(container: Container) -> None:
    for _ in range(3):
        container.check()
    assert is_running(container.service)
    assert container.log.read_text() == ""


def test_a_process_that_is_stopped_at_two_checks_in_a_row_is_killed_and_the_log_says_so(container: Container) -> None:
    service = container.service
    stop(service)
    container.check()
    assert service.status() == psutil.STATUS_STOPPED, "it may be for a moment only"
    container.check()
    until(lambda: not is_running(service))
    assert "was stopped by a signal: killed" in container.log.read_text()


def test_a_process_that_was_stopped_for_a_moment_only_goes_on(container: Container) -> None:
    service = container.service
    for _ in range(2):
        stop(service)
        container.check()
        service.send_signal(signal.SIGCONT)
        container.check()
    assert is_running(service)


def test_an_init_that_is_stopped_goes_on(container: Container) -> None:
    """The engine runs health checks beside init: here, in its namespaces, from outside."""
    stop(container.init)
    enter = ["nsenter", "--target", str(container.init.pid), "--user", "--preserve-credentials", "--mount", "--pid"]
    subprocess.run(
        [*enter, "sh", str(SCRIPT), "true"],
        check=True,
        timeout=20,
        env=os.environ | {"TMPDIR": str(container.log.parent)},
    )
    until(lambda: container.init.status() != psutil.STATUS_STOPPED)
    container.check()
