"""Deaths at named points between two side effects: of a job under way, of its end, and of its checkpoints."""

from __future__ import annotations

import time
from collections.abc import Sequence

import redis as sync_redis

from services.common.redis import keys
from services.common.service.process_tree import is_running
from tests.chaos import failpoints
from tests.chaos.campaign import ENDLESS, Campaign, campaign
from tests.chaos.faults import Options, victim
from tests.chaos.job import job_spec
from tests.chaos.result import Result
from tests.chaos.stack import ChaosError, Stack

UNDER_WAY = tuple(point for point in failpoints.POINTS if point not in failpoints.AT_THE_END)
"""Fail points that a job passes all the time."""


def points(options: Options, chosen: Sequence[str] = UNDER_WAY) -> Result:
    """Every fail point of a job under way, `count` times each: the process that comes by dies there."""
    spec = job_spec(steps=ENDLESS, interval_steps=5)
    with campaign(options.home, "fail points", options.seed, spec=spec) as running:
        for point in list(chosen) * options.count:
            running.trial(lambda point=point: die_at(running, point), pause_s=0.3, lies_in_wait=True)  # type: ignore[misc]
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
        running.stack.wait(lambda: not is_running(process), f"{point} to kill", 10.0)
    finally:
        armed.unlink(missing_ok=True)
