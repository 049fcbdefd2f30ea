"""Processes that stand still: noticed within two heartbeats and killed; and one that nobody noticed, which wakes up when it is replaced."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence

import psutil

from services.common.service import watchdog
from services.common.service.process_tree import is_running
from tests.chaos import failpoints
from tests.chaos.campaign import ENDLESS, Campaign, campaign
from tests.chaos.faults import Options, victim
from tests.chaos.job import job_spec
from tests.chaos.points import UNDER_WAY
from tests.chaos.result import Result, summary
from tests.chaos.stack import BLIND, ROOT, SECOND, ChaosError

NOTICED_S = 2 * watchdog.PERIOD_S + 1.0
"""Two heartbeats, and a second to look and to kill."""
UNNOTICED_S = 60.0
"""When nobody has noticed by then, nobody will."""
LEAVE_S = 60.0
"""Within this, one that woke up and was replaced meanwhile has ended."""


def freeze(options: Options) -> Result:
    """SIGSTOP of a target: for `hold_s`, then SIGCONT; or for ever. Whatever lasts longer than NOTICED_S must not last: it is killed."""
    how = "for ever" if options.hold_s is None else f"for {options.hold_s:g} s"
    with campaign(options.home, f"SIGSTOP {options.target} {how}", options.seed) as running:
        noticed: list[float] = []

        def strike() -> None:
            seconds = _stand_still(running, options.target, options.hold_s)
            if seconds is not None:
                noticed.append(seconds)
            if (seconds is None and (options.hold_s or 0.0) > NOTICED_S) or (seconds or 0.0) > NOTICED_S:
                after = (
                    f"was noticed after {seconds:.1f} s" if seconds else f"was not noticed within {options.hold_s} s"
                )
                running.result.violations.append(f"{options.target} stood still and {after}")

        while running.result.count < options.count:
            try:
                running.trial(strike)
            except psutil.NoSuchProcess:  # it ended before it could be stopped
                continue
        running.result.extra["killed after s"] = summary(noticed)
        running.finish()
    return running.result


def _stand_still(running: Campaign, target: str, hold_s: float | None) -> float | None:
    """Stops a process; the seconds until somebody killed it, or None when it was woken before.

    Raises:
        ChaosError: nobody did, and it was stopped for ever.
    """
    process, struck = victim(running.stack, target), time.monotonic()
    process.suspend()
    while hold_s is None or time.monotonic() - struck < hold_s:
        if not is_running(process):
            return time.monotonic() - struck
        if time.monotonic() - struck > UNNOTICED_S:
            raise ChaosError(f"nobody noticed within {UNNOTICED_S:.0f} s that {target} stands still")
        time.sleep(0.05)
    process.resume()
    return None


def wake(options: Options, chosen: Sequence[str] = ()) -> Result:
    """A rollout server, a reward service or rank 0 stands still at a fail point, unnoticed, and is replaced; then it wakes up and goes on.

    As on a machine that was cut off or suspended. What keeps that from happening on one machine is put out of action: no watch, no death
    signal, no lock on the job's folder, no orphan is killed. Each point of the target `count` times.
    """
    target, left = options.target, list[float]()
    spec = job_spec(steps=ENDLESS, interval_steps=5)
    fault = f"{target} woken and replaced"
    with campaign(options.home, fault, options.seed, spec=spec, environment={BLIND: "1"}) as running:
        for point in list(chosen or [point for point in UNDER_WAY if point.startswith(f"{target}.")]) * options.count:
            sleeper = _sleep_at(running, target, point)
            with _replaced(running, target, sleeper) as replace:
                running.trial(replace, pause_s=0.0)
                left.append(_wake(running, sleeper, point))
        running.result.extra["ended after s"] = summary(left)
        running.finish()
    return running.result


def _sleep_at(running: Campaign, target: str, point: str) -> psutil.Process:
    """The target's process, standing still at the point.

    Raises:
        ChaosError: it never came by.
    """
    process = victim(running.stack, target)
    failpoints.arm(running.stack.folder, point, running.random.randrange(3), stop=True)
    running.stack.wait(lambda: process.status() == psutil.STATUS_STOPPED, f"{target} to stand still at {point}", 60.0)
    return process


@contextlib.contextmanager
def _replaced(running: Campaign, target: str, sleeper: psutil.Process) -> Iterator[Callable[[], None]]:
    """Gives what replaces the sleeper.

    Of a rank, the end of its launcher: the agent starts another one, with ranks of its own. Of the others, a second process of their name;
    when the sleeper has ended, the supervisor starts a third one, which takes the name over, so that the second one must end too.
    """
    if target == "rank":
        yield lambda: _end_launcher(sleeper)
        return
    heirs: list[subprocess.Popen[bytes]] = []
    try:
        yield lambda: heirs.append(_second_of(running, sleeper))
        if _outlasts(heirs[0], LEAVE_S):
            running.result.violations.append(f"a {target} whose name was taken over still runs {LEAVE_S:.0f} s later")
    finally:
        for heir in heirs:
            heir.kill()
            heir.wait()


def _end_launcher(sleeper: psutil.Process) -> None:
    parent = sleeper.parent()
    if parent is None:
        raise ChaosError("the rank has no parent")
    parent.kill()


def _second_of(running: Campaign, sleeper: psutil.Process) -> subprocess.Popen[bytes]:
    """As an orchestrator would start it on another machine: the same name, with ports and a stage of its own."""
    ports = {"MILLRACE_METRICS_PORT": "0", "MILLRACE_INFERENCE_PORT": "0"}
    with (running.stack.home / "logs" / "second.log").open("ab") as log:
        return subprocess.Popen(
            sleeper.cmdline(), cwd=ROOT, env=sleeper.environ() | ports | {SECOND: "1"}, stdout=log, stderr=log
        )


def _outlasts(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return True
    return False


def _wake(running: Campaign, sleeper: psutil.Process, point: str) -> float:
    """Wakes it up; the seconds until it has ended."""
    sleeper.resume()
    woken = time.monotonic()
    try:
        running.stack.wait(lambda: not is_running(sleeper), "what was woken to end", LEAVE_S)
    except ChaosError:
        running.result.violations.append(f"woken at {point}, it still runs {LEAVE_S:.0f} s later")
        sleeper.kill()
    return time.monotonic() - woken
