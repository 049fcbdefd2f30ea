"""The faults that strike a running stack; each is a function of the campaign and its options, and gives the result."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import redis as sync_redis

from services.common import keys
from tests.chaos import failpoints
from tests.chaos.campaign import ENDLESS, Campaign, campaign
from tests.chaos.job import job_spec
from tests.chaos.result import Result
from tests.chaos.stack import TARGETS, ChaosError, Stack

FIND_S = 60.0
SAVE_S = 0.05
"""About as long as the scripted ranks' checkpoint takes."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says."""

    home: Path
    """An empty directory for this run."""
    target: str = "rollout"
    count: int = 10
    seed: int = 1
    ranks: int = 1
    hold_s: float | None = 30.0
    """How long a fault that lasts does; None for ever."""


Fault = Callable[[Options], Result]


def victim(stack: Stack, target: str, rank: int = 0) -> psutil.Process:
    """The target's process, as soon as there is one.

    Raises:
        ChaosError: there is none for a minute.
    """
    found: list[psutil.Process] = []

    def look() -> bool:
        process = stack.find(target, rank)
        if process is not None:
            found.append(process)
        return bool(found)

    stack.wait(look, f"a process of {target}", FIND_S)
    return found[0]


def kill(options: Options) -> Result:
    """kill -9 of one target, or of any (`any`), again and again, at random moments; once in five without letting the job recover first."""
    spec = job_spec(steps=ENDLESS, ranks=options.ranks)
    with campaign(options.home, f"kill -9 {options.target}", options.seed, spec=spec) as running:
        choices = TARGETS if options.target == "any" else (options.target,)

        def strike() -> None:
            for _ in range(2 if running.random.random() < 0.2 else 1):
                target = running.random.choice(choices)
                try:
                    victim(running.stack, target, running.random.randrange(options.ranks)).kill()
                except psutil.NoSuchProcess:
                    return
                time.sleep(running.random.uniform(0.0, 1.0))

        for _ in range(options.count):
            running.trial(strike)
        running.finish()
    return running.result


def power_cut(options: Options) -> Result:
    """kill -9 of everything at once, the supervisor too; then the stack is started again by hand."""
    with campaign(options.home, "kill -9 of the whole stack", options.seed) as running:

        def strike() -> None:
            running.stack.kill_everything()
            running.stack.start()

        for _ in range(options.count):
            running.trial(strike)
        running.finish()
    return running.result


UNDER_WAY = tuple(point for point in failpoints.POINTS if point not in failpoints.AT_THE_END)
"""Fail points that a job passes all the time."""


def points(options: Options, chosen: Sequence[str] = UNDER_WAY) -> Result:
    """Every fail point of a job under way, `count` times each: the process that comes by dies there."""
    spec = job_spec(steps=ENDLESS, interval_steps=5)
    with campaign(options.home, "fail points", options.seed, spec=spec) as running:
        for point in list(chosen) * options.count:
            running.trial(lambda point=point: die_at(running, point), pause_s=0.3)  # type: ignore[misc]
        running.finish()
    return running.result


def ends(options: Options) -> Result:
    """The learner is killed at the fail points of a job's end, `count` times each: the job ends all the same, and servers let it go."""
    started = time.monotonic()
    result = Result("learner killed while a job ends", 0, options.seed)
    with Stack(options.home) as stack:
        for number, point in enumerate(failpoints.AT_THE_END * options.count):
            result.count += 1
            try:
                seconds, violations = end_at(stack, point, options.seed + number)
            except ChaosError as error:
                result.violations.append(f"{point}: {error}")
                break
            result.progress_s.append(seconds)
            result.violations += violations
    result.seconds = time.monotonic() - started
    return result


def end_at(stack: Stack, point: str, seed: int) -> tuple[float, list[str]]:
    """A short job whose rank dies at a point of its end; the seconds until servers let it go, and what was violated."""
    running = Campaign(stack, job_spec(steps=30), f"{point} at the end", seed)
    armed = failpoints.arm(stack.folder, point)
    stack.wait(lambda: not armed.exists(), f"somebody to come by {point}", 60.0)
    struck = time.monotonic()
    result = running.finish(patience_s=60.0)
    with sync_redis.Redis.from_url(stack.state.redis_url) as client:
        stack.wait(lambda: not client.hexists(keys.ACTIVE, running.job_id), f"servers to let go after {point}", 30.0)
    return time.monotonic() - struck, result.violations


def saves(options: Options) -> Result:
    """The learner is killed while it saves a checkpoint: at a random moment of the save, at every other fail point of it."""
    spec = job_spec(steps=ENDLESS, interval_steps=4, ranks=options.ranks)
    inside = [point for point in failpoints.POINTS if point.startswith(("rank.checkpoint.", "rank.ranks.save"))]
    with campaign(options.home, "learner killed while it saves a checkpoint", options.seed, spec=spec) as running:
        for _ in range(options.count):
            if running.random.random() < 0.5:
                point, delay_s = "rank.checkpoint.begin:before", running.random.uniform(0.0, SAVE_S)
            else:
                point, delay_s = running.random.choice(inside), 0.0
            running.trial(lambda point=point, delay_s=delay_s: die_at(running, point, delay_s), pause_s=0.3)  # type: ignore[misc]
        running.finish()
    return running.result


def die_at(running: Campaign, point: str, delay_s: float = 0.0) -> None:
    """Arms a point and waits until a process has died there.

    Raises:
        ChaosError: nobody came by.
    """
    service = point.partition(".")[0]
    process = victim(running.stack, service)
    armed = failpoints.arm(running.stack.folder, point, running.random.randrange(3), delay_s)
    try:
        running.stack.wait(lambda: not armed.exists(), f"somebody to come by {point}", 60.0)
        running.stack.wait(
            lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, f"{point} to kill", 10.0
        )
    except psutil.NoSuchProcess:
        return
    finally:
        armed.unlink(missing_ok=True)


def redis_restart(options: Options) -> Result:
    """SIGTERM of Redis: it saves, ends, and is started again."""
    with campaign(options.home, "redis restarted", options.seed) as running:
        for _ in range(options.count):
            running.trial(lambda: victim(running.stack, "redis").send_signal(signal.SIGTERM))
        running.finish()
    return running.result


def redis_flush(options: Options) -> Result:
    """FLUSHALL in the middle of the job."""
    with campaign(options.home, "redis emptied", options.seed) as running:

        def strike() -> None:
            with sync_redis.Redis.from_url(running.stack.state.redis_url) as client:
                client.flushall()

        for _ in range(options.count):
            running.trial(strike)
        running.finish()
    return running.result


def freeze(options: Options) -> Result:
    """SIGSTOP of a target: for `hold_s`, then SIGCONT; or for ever, until somebody else ends it."""
    how = "for ever" if options.hold_s is None else f"for {options.hold_s:g} s"
    with campaign(options.home, f"SIGSTOP {options.target} {how}", options.seed) as running:
        noticed: list[float] = []

        def strike() -> None:
            process, struck = victim(running.stack, options.target), time.monotonic()
            process.suspend()
            while options.hold_s is None or time.monotonic() - struck < options.hold_s:
                if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                    noticed.append(time.monotonic() - struck)
                    return
                if time.monotonic() - struck > FIND_S * 2:
                    raise ChaosError(f"nobody noticed within {FIND_S * 2:.0f} s that {options.target} stands still")
                time.sleep(0.05)
            process.resume()

        for _ in range(options.count):
            try:
                running.trial(strike)
            except psutil.NoSuchProcess:
                continue
        running.result.extra["killed_after_s"] = [round(seconds, 1) for seconds in noticed]
        running.finish()
    return running.result
