"""An hour ahead and an hour behind, for the wall clock of each service and of Redis: nothing is trained twice, and the job goes on."""

from __future__ import annotations

import shutil
import struct
import subprocess
import time
from pathlib import Path

import redis as sync_redis

from tests.chaos.campaign import Campaign, campaign
from tests.chaos.clock import offset_file, seen_file
from tests.chaos.faults import Options
from tests.chaos.result import Result
from tests.chaos.stack import PRELOAD

HOUR_S = 3600
REDIS_CLOCK = "MILLRACE_CHAOS_CLOCK"
SERVICES = ("gateway", "reward", "rollout", "learner", "rank")
MOVED_S = 30.0
"""Within this, a service has looked at its clock."""
SLACK_S = 60.0
_OFFSET = struct.Struct("<q")


def clock(options: Options) -> Result:
    """Each service's clock, Redis's too, is moved by an hour ahead, then back, then an hour behind, then back; `count` times."""
    redis_clock = options.home / "redis.clock"
    redis_clock.write_bytes(_OFFSET.pack(0))
    library = compile_shift(options.home)
    environment = {PRELOAD: str(library), REDIS_CLOCK: str(redis_clock)} if library is not None else {}
    services = [*SERVICES, *(["redis"] if library is not None else [])]
    with campaign(options.home / "stack", "clock moved by an hour", options.seed, environment=environment) as running:

        def move(service: str, seconds: int) -> None:
            if service == "redis":
                with redis_clock.open("r+b") as file:
                    file.write(_OFFSET.pack(seconds))
                running.stack.wait(lambda: abs(_ahead_s(running) - seconds) < SLACK_S, "Redis's clock to move", MOVED_S)
                return
            path, seen = offset_file(running.stack.folder, service), seen_file(running.stack.folder, service)
            temporary = path.with_suffix(".tmp")
            temporary.write_text(str(seconds))
            temporary.rename(path)
            running.stack.wait(
                lambda: seen.exists() and seen.read_text() == str(float(seconds)),
                f"the clock of {service} to move",
                MOVED_S,
            )

        for service in services * options.count:
            for seconds in (HOUR_S, 0, -HOUR_S, 0):
                running.trial(lambda service=service, seconds=seconds: move(service, seconds))  # type: ignore[misc]
        running.result.extra["clocks"] = services
        running.finish()
    return running.result


def _ahead_s(running: Campaign) -> float:
    """By how much Redis's clock is ahead of the harness's."""
    with sync_redis.Redis.from_url(running.stack.state.redis_url, socket_timeout=5.0) as client:
        seconds, _ = client.time()
    return float(seconds) - time.time()


def compile_shift(folder: Path) -> Path | None:
    """The library that moves a program's clock, or None where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    library = folder / "clockshift.so"
    source = Path(__file__).with_name("clockshift.c")
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(source)], check=True, timeout=60)
    return library
