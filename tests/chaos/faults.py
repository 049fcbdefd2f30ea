"""The faults that strike a running stack; each is a function of the campaign and its options, and gives the result."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import redis as sync_redis

from tests.chaos.campaign import ENDLESS, campaign
from tests.chaos.job import job_spec
from tests.chaos.result import Result
from tests.chaos.stack import TARGETS, Stack

FIND_S = 60.0
PROGRESS_P95_S = 10.0
"""After a kill, with no model to load."""


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
    only: int | None = None
    """Of hostile jobs: the one case of this number, in place of the first `count`."""
    real: bool = False
    """Hostile jobs get a real engine and real ranks."""


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


def slay(stack: Stack, target: str, rank: int = 0) -> None:
    """kill -9 of the target's process; of the next one, should it end by itself before."""
    while True:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim(stack, target, rank).kill()
            return


def kill(options: Options) -> Result:
    """kill -9 of one target, or of any (`any`), again and again, at random moments; once in five without letting the job recover first."""
    return _kills(options, f"kill -9 {options.target}", job_spec(steps=ENDLESS, ranks=options.ranks))


def kill_in_turns(options: Options) -> Result:
    """The same of a job whose engine and learner take turns on the same devices."""
    spec = job_spec(steps=ENDLESS, ranks=options.ranks, placement={"rollout": "colocated"})
    return _kills(options, f"kill -9 {options.target}, in turns", spec)


def _kills(options: Options, fault: str, spec: dict[str, Any]) -> Result:
    with campaign(options.home, fault, options.seed, spec=spec) as running:
        running.result.progress_p95_s = PROGRESS_P95_S
        choices = TARGETS if options.target == "any" else (options.target,)

        def strike() -> None:
            for _ in range(2 if running.random.random() < 0.2 else 1):
                target = running.random.choice(choices)
                slay(running.stack, target, running.random.randrange(options.ranks))
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
