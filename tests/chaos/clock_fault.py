"""An hour ahead and an hour behind, for the wall clock of each service and of Redis: nothing is trained twice, and the job goes on."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

from tests.chaos.campaign import campaign
from tests.chaos.clock import offset_file
from tests.chaos.faults import Options
from tests.chaos.result import Result
from tests.chaos.stack import PRELOAD

HOUR_S = 3600
REDIS_CLOCK = "MILLRACE_CHAOS_CLOCK"
SERVICES = ("gateway", "reward", "rollout", "learner", "rank")
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
            else:
                path = offset_file(running.stack.folder, service)
                temporary = path.with_suffix(".tmp")
                temporary.write_text(str(seconds))
                temporary.rename(path)

        for service in services * options.count:
            for seconds in (HOUR_S, 0, -HOUR_S, 0):
                running.trial(lambda service=service, seconds=seconds: move(service, seconds))  # type: ignore[misc]
        running.result.extra["services"] = services
        running.finish()
    return running.result


def compile_shift(folder: Path) -> Path | None:
    """The library that moves a program's clock, or None where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    library = folder / "clockshift.so"
    source = Path(__file__).with_name("clockshift.c")
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(source)], check=True, timeout=60)
    return library
