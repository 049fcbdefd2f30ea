"""An hour ahead and an hour behind, for the wall clock of each service and of Redis: nothing is trained twice, and the job goes on."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

from tests.chaos.campaign import Campaign, campaign
from tests.chaos.faults import Options, victim
from tests.chaos.result import Result
from tests.chaos.stack import CLOCKS, PRELOAD, ChaosError

HOUR_S = 3600
SERVICES = ("gateway", "reward-0", "rollout-0", "learner-0", "redis")
"""By their names in the supervisor's table; the learner's ranks have their agent's clock, as they have its machine."""
_OFFSET = struct.Struct("<q")


def clock(options: Options) -> Result:
    """Each service's clock, Redis's too, is moved by an hour ahead, then back, then an hour behind, then back; `count` times."""
    clocks = options.home / "clocks"
    environment = clocks_of(options.home, clocks)
    with campaign(options.home / "stack", "clock moved by an hour", options.seed, environment=environment) as running:
        for service in SERVICES * options.count:
            _require_mapped(running, service, clocks / service)
            for seconds in (HOUR_S, 0, -HOUR_S, 0):
                running.trial(lambda service=service, seconds=seconds: move_clock(clocks / service, seconds))  # type: ignore[misc]
        running.result.extra["clocks"] = list(SERVICES)
        running.finish()
    return running.result


def clocks_of(folder: Path, clocks: Path) -> dict[str, str]:
    """Makes a clock for each service in the new directory `clocks`; the environment of a stack that goes by them.

    Raises:
        ChaosError: there is no C compiler.
    """
    clocks.mkdir()
    for service in SERVICES:
        (clocks / service).write_bytes(_OFFSET.pack(0))
    return {PRELOAD: str(compile_shift(folder)), CLOCKS: str(clocks)}


def move_clock(clock: Path, seconds: int) -> None:
    """Puts a service's clock ahead of the machine's by so much."""
    with clock.open("r+b") as file:
        file.write(_OFFSET.pack(seconds))


def _require_mapped(running: Campaign, service: str, path: Path) -> None:
    """Makes sure that the process, and rank 0 with the learner, goes by the clock in the file."""
    name = service.partition("-")[0]
    for target in (name, "rank") if name == "learner" else (name,):
        process = victim(running.stack, target)
        if str(path) not in Path(f"/proc/{process.pid}/maps").read_text():
            raise ChaosError(f"the clock of {target} cannot be moved")


def compile_shift(folder: Path) -> Path:
    """The library that moves a program's clock.

    Raises:
        ChaosError: there is no C compiler.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise ChaosError("moving a clock takes a C compiler (Debian: apt-get install gcc libc6-dev)")
    library = folder / "clockshift.so"
    source = Path(__file__).with_name("clockshift.c")
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(source)], check=True, timeout=60)
    return library
