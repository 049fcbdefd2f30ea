"""The supervisor over real processes: what dies comes back, a drain has an order, and nothing survives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from services.cli.stack.segments import SHARED_MEMORY
from services.common.service.lost_processes import lost_processes
from services.common.service.process_tree import is_running
from services.common.service.stack_state import UpState, read_state

MUTE_S = 20.0  # as drive.py has it
DRIVE = Path(__file__).parents[1] / "drive.py"
GOOD = ("redis:2:good", "gateway:1:good", "learner-0:0:good", "rollout-0:0:good")


class Stack:
    """A supervisor in a process of its own."""

    def __init__(self, home: Path, *rows: str) -> None:
        self.home = home
        with (home / "said").open("wb") as said:
            self.process = subprocess.Popen([sys.executable, str(DRIVE), str(home), *rows], stdout=said, stderr=said)

    @property
    def said(self) -> str:
        return (self.home / "said").read_text()

    @property
    def state(self) -> UpState | None:
        return read_state(self.home)

    def notes(self) -> list[list[str]]:
        """What the stand-ins noted, in order: [what, name, pid]."""
        path = self.home / "notes"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def started(self) -> set[int]:
        """Every process that the stack ever had, helpers included."""
        pids = {int(note[2]) for note in self.notes()}
        return pids | {int(note[0].partition("=")[2]) for note in self.notes() if note[0].startswith("helper=")}

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"waited in vain; it said:\n{self.said}\n{self.state}"
            time.sleep(0.05)

    def is_ready(self) -> bool:
        return self.state is not None and self.state.ready

    def pid(self, name: str) -> int:
        assert self.state is not None
        return self.state.processes[name].pid

    def has_another(self, name: str, pid: int) -> bool:
        """Whether the service runs in another process, by one look at the state: while it restarts it is not there."""
        state = self.state
        return state is not None and name in state.processes and state.processes[name].pid != pid

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)


def has_restarted(stack: Stack, name: str, times: int) -> bool:
    return stack.state is not None and stack.is_ready() and stack.state.processes[name].restarts == times


def running(pids: set[int]) -> set[int]:
    return set(filter(is_running, pids))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Stack]]:
    stacks: list[Stack] = []

    def begin(*rows: str) -> Stack:
        stacks.append(Stack(tmp_path, *rows))
        return stacks[-1]

    yield begin
    for stack in stacks:
        stack.process.kill()
        stack.process.wait()
        for pid in running(stack.started()):
            os.kill(pid, signal.SIGKILL)


def test_a_drain_takes_the_stages_in_order_and_nothing_survives(start: Callable[..., Stack]) -> None:
    stack = start(*GOOD)
    stack.wait_until(stack.is_ready)
    assert stack.end() == 0
    order = [note[1] for note in stack.notes() if note[0] == "end"]
    assert set(order[:2]) == {"learner-0", "rollout-0"}
    assert order[2:] == ["gateway", "redis"]
    asked = [(note[0], note[1]) for note in stack.notes()]
    assert asked.index(("end", "learner-0")) < asked.index(("term", "gateway")) < asked.index(("term", "redis"))
    assert len(stack.started()) == 8
    assert not running(stack.started())


def test_the_higher_stage_is_ready_before_the_lower_starts(start: Callable[..., Stack]) -> None:
    stack = start(*reversed(GOOD))
    stack.wait_until(stack.is_ready)
    order = [note[1] for note in stack.notes() if note[0] == "start"]
    assert order[:2] == ["redis", "gateway"]
    assert set(order[2:]) == {"learner-0", "rollout-0"}
    stack.end()


def test_a_killed_process_is_restarted_and_its_orphans_are_ended(start: Callable[..., Stack]) -> None:
    stack = start(*GOOD)
    stack.wait_until(stack.is_ready)
    before, untouched = stack.pid("rollout-0"), stack.pid("learner-0")
    helper = next(
        int(note[0].partition("=")[2])
        for note in stack.notes()
        if note[0].startswith("helper=") and int(note[2]) == before
    )
    assert running({helper}) == {helper}
    os.kill(before, signal.SIGKILL)
    stack.wait_until(lambda: stack.is_ready() and stack.has_another("rollout-0", before))
    assert "rollout-0 was killed by SIGKILL; starting it again" in stack.said
    assert stack.state is not None
    assert stack.state.processes["rollout-0"].restarts == 1
    assert stack.pid("learner-0") == untouched
    assert not running({helper})
    assert stack.end() == 0
    assert not running(stack.started())


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives orphans to another process than init")
def test_an_orphan_that_ends_leaves_no_zombie_while_its_service_goes_on(start: Callable[..., Stack]) -> None:
    stack = start("rollout-0:0:orphans", "gateway:1:good")
    stack.wait_until(lambda: any(note[0].startswith("orphan=") for note in stack.notes()))
    orphan = next(int(note[0].partition("=")[2]) for note in stack.notes() if note[0].startswith("orphan="))
    stack.wait_until(stack.is_ready)
    stack.wait_until(lambda: not psutil.pid_exists(orphan), 10)
    assert "starting it again" not in stack.said
    assert stack.end() == 0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="shared memory has names on Linux only")
def test_processes_that_are_killed_again_and_again_leave_nothing_behind(start: Callable[..., Stack]) -> None:
    stack = start("reward-0:0:litter", "learner-0:0:litter")
    stack.wait_until(stack.is_ready)
    time.sleep(1.0)  # two looks at shared memory
    for restarts in (1, 2, 3):
        os.kill(stack.pid("reward-0"), signal.SIGKILL)
        stack.wait_until(partial(has_restarted, stack, "reward-0", restarts))
        time.sleep(1.0)
        assert sorted(path.parent.parent.name for path in stack.home.glob("tmp/*/*/file")) == ["learner-0", "reward-0"]
    made = [Path(SHARED_MEMORY, note[0].partition("=")[2]) for note in stack.notes() if note[0].startswith("segment=")]
    assert len(made) == 5
    assert sum(path.exists() for path in made) == 2
    assert stack.end() == 0
    assert not any(path.exists() for path in made)
    assert not list(stack.home.glob("tmp/*"))


def test_a_process_that_says_it_is_sick_is_restarted(start: Callable[..., Stack]) -> None:
    stack = start("reward-0:0:good")
    stack.wait_until(stack.is_ready)
    before = stack.pid("reward-0")
    sick = stack.home / "notes.sick-reward-0"
    sick.touch()
    stack.wait_until(lambda: "reward-0 is not healthy (503: sick)" in stack.said)
    sick.unlink()
    stack.wait_until(lambda: stack.is_ready() and stack.has_another("reward-0", before))
    stack.end()


HEARTBEAT_S = 1.0  # as drive.py sets it
STANDS_STILL_S = 4.0


def test_a_stopped_process_is_noticed_killed_and_replaced(start: Callable[..., Stack]) -> None:
    stack = start(*GOOD)
    stack.wait_until(stack.is_ready)
    for name in ("redis", "rollout-0"):
        before = stack.pid(name)
        os.kill(before, signal.SIGSTOP)
        began = time.monotonic()
        stack.wait_until(lambda name=name: f"{name} hangs: no answer for" in stack.said)  # type: ignore[misc]
        assert time.monotonic() - began < 2 * HEARTBEAT_S + STANDS_STILL_S + 2.0
        assert not running({before}), "it can never wake up"
        stack.wait_until(lambda name=name, before=before: stack.is_ready() and stack.pid(name) != before)  # type: ignore[misc]
    assert f"and process {before} is stopped" in stack.said
    assert stack.end() == 0


def test_a_process_that_is_stopped_before_it_is_ready_is_killed_and_started_again(start: Callable[..., Stack]) -> None:
    stack = start("gateway:1:good", "rollout-0:0:good")
    stack.wait_until(stack.is_ready)
    sleeps = stack.home / "notes.sleeps-rollout-0"
    sleeps.touch()
    first = stack.pid("rollout-0")
    os.kill(first, signal.SIGKILL)
    stack.wait_until(lambda: stack.has_another("rollout-0", first))
    second, began = stack.pid("rollout-0"), time.monotonic()
    os.kill(second, signal.SIGSTOP)
    stack.wait_until(lambda: "rollout-0 hangs: it was stopped before it was ready" in stack.said)
    assert time.monotonic() - began < 2 * HEARTBEAT_S + STANDS_STILL_S
    assert not running({second}), "it can never wake up"
    sleeps.unlink()
    stack.wait_until(lambda: stack.is_ready() and stack.has_another("rollout-0", second))
    assert stack.end() == 0


def test_one_that_does_not_say_whether_it_is_ready_holds_up_nobody(start: Callable[..., Stack]) -> None:
    stack = start("rollout-0:0:mute", "reward-0:0:quick")
    began = time.monotonic()
    stack.wait_until(lambda: stack.state is not None and "reward-0" in stack.state.lost)
    assert time.monotonic() - began < MUTE_S
    assert stack.end() == 0
    assert not running(stack.started())


@pytest.mark.slow
def test_a_process_that_was_stopped_for_a_moment_only_goes_on(start: Callable[..., Stack]) -> None:
    stack = start("reward-0:0:good")
    stack.wait_until(stack.is_ready)
    before = stack.pid("reward-0")
    os.kill(before, signal.SIGSTOP)
    time.sleep(HEARTBEAT_S)
    os.kill(before, signal.SIGCONT)
    time.sleep(STANDS_STILL_S + 2 * HEARTBEAT_S)
    assert stack.pid("reward-0") == before
    assert "hangs" not in stack.said
    stack.end()


def test_the_stack_goes_on_without_one_of_several_servers_and_tries_it_again(start: Callable[..., Stack]) -> None:
    stack = start("rollout-0:0:good", "rollout-1:0:good", "gateway:1:good")
    stack.wait_until(stack.is_ready)
    broken = stack.home / "notes.broken-rollout-1"
    broken.touch()
    untouched = stack.pid("rollout-0")
    os.kill(stack.pid("rollout-1"), signal.SIGKILL)
    stack.wait_until(lambda: stack.state is not None and "rollout-1" in stack.state.lost)
    assert stack.state is not None
    assert stack.state.lost == {"rollout-1": "ended with code 1: rollout-1 says why"}
    assert lost_processes(stack.home)[0].cause == "ended with code 1: rollout-1 says why"
    assert stack.state.ready
    assert "the others go on meanwhile" in stack.said
    broken.unlink()
    stack.wait_until(lambda: stack.state is not None and not stack.state.lost)
    assert stack.pid("rollout-0") == untouched
    assert stack.end() == 0


@pytest.mark.slow
def test_what_cannot_be_kept_alive_is_given_up_with_its_cause_and_the_stack_goes_on_and_tries_it_again(
    start: Callable[..., Stack],
) -> None:
    stack = start("rollout-0:0:good", "gateway:1:good")
    stack.wait_until(stack.is_ready)
    broken, untouched = stack.home / "notes.broken-rollout-0", stack.pid("gateway")
    broken.touch()
    os.kill(stack.pid("rollout-0"), signal.SIGKILL)
    stack.wait_until(lambda: stack.state is not None and "rollout-0" in stack.state.lost)
    tries = len(stack.notes())
    stack.wait_until(lambda: len(stack.notes()) > tries + 1)
    assert stack.process.poll() is None
    broken.unlink()
    stack.wait_until(lambda: stack.state is not None and not stack.state.lost)
    assert stack.pid("gateway") == untouched
    assert stack.end() == 0
    assert not running(stack.started())
    assert lost_processes(stack.home) == [], "no supervisor, no news"


@pytest.mark.slow
def test_a_stack_becomes_ready_without_what_keeps_dying_from_its_first_start_on(start: Callable[..., Stack]) -> None:
    stack = start("gateway:1:good", "learner-0:0:quick")
    stack.wait_until(stack.is_ready)
    assert stack.state is not None
    assert stack.state.lost == {"learner-0": "ended with code 1: learner-0 says why"}
    stack.wait_until(lambda: "ready, without learner-0" in stack.said)
    assert [note[1] for note in stack.notes()].count("learner-0") >= 4  # the first start and one for each wait
    assert stack.end() == 0
    assert not running(stack.started())


def test_what_others_start_after_is_waited_for_however_long_it_takes(
    start: Callable[..., Stack], tmp_path: Path
) -> None:
    broken = tmp_path / "notes.broken-redis"
    broken.touch()
    stack = start("redis:2:good", "gateway:1:good")
    stack.wait_until(lambda: stack.state is not None and "redis" in stack.state.lost)
    assert stack.state is not None
    assert not stack.state.ready
    assert "gateway" not in [note[1] for note in stack.notes()]
    broken.unlink()
    stack.wait_until(stack.is_ready)
    assert stack.end() == 0


def test_a_wrong_setting_before_all_was_ready_is_read_by_a_person_and_not_tried_again(
    start: Callable[..., Stack],
) -> None:
    stack = start("gateway:1:good", "learner-0:0:wrong")
    assert stack.process.wait(60) == 1
    assert "WrongSettingError: learner-0 ended with code 2: learner-0 says why; gave up on it." in stack.said
    assert stack.said.rstrip().endswith("learner-0 says why")
    assert [note[1] for note in stack.notes()].count("learner-0") == 1
    assert ["end", "gateway"] in [note[:2] for note in stack.notes()]
    assert not running(stack.started())


def test_a_wrong_setting_of_a_stack_that_was_ready_ends_nobody_else(start: Callable[..., Stack]) -> None:
    stack = start("learner-0:0:good", "gateway:1:good")
    stack.wait_until(stack.is_ready)
    refuses = stack.home / "notes.refuses-learner-0"
    refuses.touch()
    os.kill(stack.pid("learner-0"), signal.SIGKILL)
    stack.wait_until(lambda: stack.state is not None and "learner-0" in stack.state.lost)
    assert stack.state is not None
    assert stack.state.lost == {"learner-0": "ended with code 2: learner-0 says why"}
    refuses.unlink()
    stack.wait_until(lambda: stack.state is not None and not stack.state.lost)
    assert stack.end() == 0


@pytest.mark.slow
def test_what_is_not_ready_in_time_is_started_again_and_the_stack_is_ready_without_it(
    start: Callable[..., Stack],
) -> None:
    stack = start("rollout-0:0:unready", "gateway:1:good")
    stack.wait_until(lambda: "rollout-0 was not ready within 5 s (503: not yet); starting it again" in stack.said)
    stack.wait_until(stack.is_ready)
    assert stack.state is not None
    assert stack.state.lost == {"rollout-0": "was not ready within 5 s (503: not yet)"}
    stack.wait_until(lambda: [note[0] for note in stack.notes() if note[1] == "rollout-0"].count("start") >= 3)
    assert stack.end() == 0
    assert not running(stack.started())


def test_what_does_not_drain_in_time_is_killed(start: Callable[..., Stack]) -> None:
    stack = start("rollout-0:0:deaf", "gateway:1:good")
    stack.wait_until(stack.is_ready)
    assert stack.end() == 0
    assert "rollout-0 did not drain in time: killed" in stack.said
    assert ["end", "gateway"] in [note[:2] for note in stack.notes()]
    assert not running(stack.started())


def test_a_second_signal_does_not_wait_for_the_drain(start: Callable[..., Stack]) -> None:
    stack = start("rollout-0:0:deaf:600")
    stack.wait_until(stack.is_ready)
    stack.process.send_signal(signal.SIGINT)
    stack.wait_until(lambda: "deaf" in [note[0] for note in stack.notes()])
    assert stack.end(signal.SIGINT) == 0
    assert "rollout-0 drains no more: killed" in stack.said
    assert not running(stack.started())


def test_starting_twice_on_one_home_is_refused(start: Callable[..., Stack]) -> None:
    stack = start("gateway:1:good")
    stack.wait_until(stack.is_ready)
    second = subprocess.run(
        [sys.executable, str(DRIVE), str(stack.home), *GOOD], capture_output=True, text=True, check=False
    )
    assert second.returncode == 1
    assert f"ConfigError: millrace is already up in {stack.home} (process {stack.process.pid}" in second.stdout
    assert stack.process.poll() is None
    assert stack.end() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")
def test_a_killed_supervisor_takes_its_processes_along(start: Callable[..., Stack]) -> None:
    stack = start(*GOOD)
    names = {"gateway", "learner-0", "redis", "rollout-0"}
    stack.wait_until(lambda: stack.is_ready() and {note[1] for note in stack.notes()} == names)
    stack.end(signal.SIGKILL)
    stack.wait_until(lambda: not running(stack.started()))
    assert sorted(note[1] for note in stack.notes() if note[0] == "end") == sorted(names)
