"""Episodes in trouble: an environment's process, the environment service or the rollout server is struck in mid-turn; hostile worlds.

After all of it every trained episode can be played again, and no place was held longer than its limit and half a second.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from services.common.service.process_tree import is_running
from tests.chaos import failpoints, held
from tests.chaos.campaign import ENDLESS, Campaign, campaign
from tests.chaos.faults import Options, victim
from tests.chaos.freeze import NOTICED_S, UNNOTICED_S
from tests.chaos.held import Stopped
from tests.chaos.hostile import nothing_left_behind
from tests.chaos.job import TALKING, job_spec
from tests.chaos.result import Result
from tests.chaos.scripted import script
from tests.chaos.stack import ChaosError
from tests.chaos.worlds import package, world

GRACE_S = 0.5
"""A place is free again within its limit and this."""
LIMIT_S = 3.0
"""Of an answer."""
STEP_S = 0.02
"""What an answer takes."""
THINK_S = 0.03
"""About what the policy takes for a turn."""
GROUPS = 4
"""In the engine at once, and in a step."""
PLACES = 20
"""As many episodes as the groups have: one place that is not given back is missed."""
MEMORY_MIB = 400
AT_ONCE = 4
"""Blows at children, one after the other, until the job must have gone on."""
LOOK_S = 0.005
FOUND_S = 180.0
PATIENCE_S = 300.0
"""A job that has not gone on after so long hangs. Others use this machine at the same time, and a service starts in a minute then."""


@dataclass(frozen=True, slots=True)
class Blow:
    """Where a process is struck: at a fail point, and up to so much later, while it goes on."""

    point: str
    delay_s: float = 0.0


BLOWS: dict[str, Sequence[Blow]] = {
    "world": (
        Blow("world.player.reset:after", THINK_S), Blow("world.player.step:before"), Blow("world.player.step:before", STEP_S),
        Blow("world.player.step:after"), Blow("world.player.step:after", THINK_S),
    ),
    "environment": (
        Blow("environment.episode.reset:after"), Blow("environment.episode.reply:after"),
        Blow("environment.episode.step:before", STEP_S), Blow("environment.episode.step:after"),
    ),
    "rollout": (
        Blow("rollout.episode.reset:after", THINK_S), Blow("rollout.episode.step:before"),
        Blow("rollout.episode.step:before", STEP_S), Blow("rollout.episode.step:after"),
    ),
}  # fmt: skip
"""After the reset, between a reply and its step, during a step, and between a step and the next reply; of each target."""


@dataclass(slots=True)
class Struck:
    """What the harness did to the services."""

    stopped: list[Stopped] = field(default_factory=list)
    rollout_deaths: list[float] = field(default_factory=list)
    noticed_s: list[float] = field(default_factory=list)
    """Of services that were stopped for ever: until they were killed."""


def episode_spec(*, limit_s: float = LIMIT_S, hostile: bool = False) -> dict[str, Any]:
    """The job whose rollouts are episodes."""
    config = {"step_s": STEP_S, "hostile": hostile, "limit_s": limit_s}
    rollout = {
        "group_size": script.GROUP_SIZE, "rollout_max_tokens": 256, "max_concurrent_groups": GROUPS, "group_timeout_s": 20.0,
        "max_attempts": 20, **({"min_group_size": 2, "max_attempts": 2} if hostile else {}),
    }  # fmt: skip
    return job_spec(
        steps=ENDLESS, model={"path": TALKING, "dtype": "float32"}, rollout=rollout,
        data={"train": {"source": f"environment:{world.NAME}", "config": config, "size": 1_000_000}, "shuffle": False},
        environment={"max_turns": 6, "max_turn_tokens": script.TOKENS, "max_observation_tokens": 64, "step_timeout_s": limit_s},
        algorithm={"filter_groups_train_batch_size": GROUPS},
    )  # fmt: skip


@contextlib.contextmanager
def _playing(options: Options, fault: str, spec: dict[str, Any], struck: Struck, grace_s: float) -> Iterator[Campaign]:
    """A job whose rollouts are episodes; judged at the end."""
    environment = package.install(options.home) | {
        "MILLRACE_ENVIRONMENT_PLACES": str(PLACES), "MILLRACE_ENVIRONMENT_MEMORY_MIB": str(MEMORY_MIB)
    }  # fmt: skip
    left = Result(fault, 0, options.seed)
    with nothing_left_behind(left):
        with campaign(options.home, fault, options.seed, spec=spec, environment=environment) as running:
            yield running
            running.finish(PATIENCE_S)
        running.result.violations += _judge_places(running, struck, grace_s)
    running.result.violations += left.violations


def _judge_places(running: Campaign, struck: Struck, grace_s: float) -> Iterator[str]:
    """Whatever was held beyond its limit, and the longest of it in the result."""
    found = list(held.beyond_limits(held.read(running.stack.folder), struck.stopped))
    late = [(each.beyond_s, f"{each.slot}, {each.doing}") for each in found]
    late += [
        (seconds, f"{held.PLACE} of a dead rollout server") for seconds in held.left_late(found, struck.rollout_deaths)
    ]
    longest = {
        slot: round(max([0.0, *(seconds for seconds, what in late if what.startswith(slot))]), 2)
        for slot in (held.PLACE, held.WAIT, held.ENGINE)
    }
    reasons = Counter(each.failed for each in found if each.slot == held.WAIT and each.failed)
    running.result.extra["held beyond its limit s"] = longest
    if reasons:
        running.result.extra["episodes failed"] = dict(sorted(reasons.items()))
    for seconds, what in late:
        if seconds > grace_s:
            yield f"{what}: held {seconds:.2f} s beyond its limit"


def kill(options: Options, grace_s: float = GRACE_S) -> Result:
    """SIGKILL of `world` (an environment's process), `environment` or `rollout`, in mid-turn."""
    struck = Struck()

    def blow(running: Campaign, blow: Blow) -> None:
        if options.target == "world":
            _arm(running, blow)
            return
        process = victim(running.stack, options.target)
        _arm(running, blow)
        _until(running, lambda: not is_running(process), f"{options.target} to die at {blow.point}")
        if options.target == "rollout":
            struck.rollout_deaths.append(time.monotonic())

    return _strike(options, f"SIGKILL of {options.target} in mid-turn", struck, blow, grace_s)


def stop(options: Options, grace_s: float = GRACE_S) -> Result:
    """SIGSTOP of the same, in mid-turn: a child for ever; a service in turns for ever, and for less than anybody notices."""
    struck = Struck()

    def blow(running: Campaign, blow: Blow) -> None:
        if options.target == "world":
            _arm(running, blow, stop=True)
            return
        process = victim(running.stack, options.target)
        _arm(running, blow, stop=True)
        _until(running, lambda: _stands_still(process), f"{options.target} to stand still at {blow.point}")
        _hold(running, process, running.random.choice((0.5, LIMIT_S + 1.0, None)), options.target, struck)

    result = _strike(options, f"SIGSTOP of {options.target} in mid-turn", struck, blow, grace_s)
    if struck.noticed_s:
        result.extra["killed after s"] = round(max(struck.noticed_s), 2)
    return result


def _strike(
    options: Options, fault: str, struck: Struck, blow: Callable[[Campaign, Blow], None], grace_s: float
) -> Result:
    at_once = AT_ONCE if options.target == "world" else 1
    with _playing(options, fault, episode_spec(), struck, grace_s) as running:
        blows = [list(BLOWS[options.target])[number % len(BLOWS[options.target])] for number in range(options.count)]
        running.random.shuffle(blows)
        while blows:
            now, blows = blows[:at_once], blows[at_once:]
            running.trial(partial(_all_of, blow, running, now), pause_s=0.3, patience_s=PATIENCE_S, lies_in_wait=True)
            running.result.count += len(now) - 1
    return running.result


def _all_of(blow: Callable[[Campaign, Blow], None], running: Campaign, blows: Sequence[Blow]) -> None:
    for each in blows:
        blow(running, each)


def _arm(running: Campaign, blow: Blow, *, stop: bool = False) -> None:
    """Arms the point, and waits until a process is struck there."""
    rng = running.random
    delay_s = rng.uniform(0.0, blow.delay_s) if blow.delay_s else 0.0
    armed = failpoints.arm(running.stack.folder, blow.point, rng.randrange(3), delay_s, stop=stop)
    try:
        running.stack.wait(lambda: not armed.exists(), f"somebody to come by {blow.point}", FOUND_S)
    finally:
        armed.unlink(missing_ok=True)


def _hold(running: Campaign, process: psutil.Process, hold_s: float | None, target: str, struck: Struck) -> None:
    """Lets the stopped service stand still for so long, or until it is killed."""
    began = time.monotonic()
    while is_running(process) and (hold_s is None or time.monotonic() - began < hold_s):
        if time.monotonic() - began > UNNOTICED_S:
            raise ChaosError(f"nobody noticed within {UNNOTICED_S:.0f} s that {target} stands still")
        time.sleep(LOOK_S)
    ended = time.monotonic()
    struck.stopped.append(Stopped(process.pid, began, ended))
    if is_running(process):
        process.resume()
        return
    struck.noticed_s.append(ended - began)
    if target == "rollout":
        struck.rollout_deaths.append(ended)
    if ended - began > NOTICED_S:
        running.result.violations.append(f"{target} stood still and was noticed after {ended - began:.1f} s")


def _stands_still(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.status() == psutil.STATUS_STOPPED
    return False


def _until(running: Campaign, condition: Callable[[], bool], what: str) -> None:
    """As `Stack.wait`, looking more often."""
    deadline = time.monotonic() + FOUND_S
    while not condition():
        if time.monotonic() > deadline:
            running.stack.wait(condition, what, 0.0)
        time.sleep(LOOK_S)


HOSTILE_LIMIT_S = 1.5
"""Of an answer of a hostile world."""


def hostile(options: Options, grace_s: float = GRACE_S) -> Result:
    """Worlds that do wrong in half of the tasks, until `count` deeds are done."""
    struck, spec = Struck(), episode_spec(limit_s=HOSTILE_LIMIT_S, hostile=True)
    with _playing(options, "hostile environments", spec, struck, grace_s) as running:
        folder, began = running.stack.folder, running.stack.step(running.job_id) or 0
        while (done := package.deeds_of(folder).total()) < options.count:
            running.stack.wait(partial(_more_than, folder, done), "another deed", FOUND_S)
        running.stack.wait_for_step(running.job_id, began + running.further)
    running.result.count = (deeds := package.deeds_of(folder)).total()
    running.result.violations += _unnoticed(folder, deeds)
    running.result.extra["deeds"] = dict(sorted(_by_name(deeds).items()))
    return running.result


def _more_than(folder: Path, done: int) -> bool:
    return package.deeds_of(folder).total() > done


def _by_name(deeds: Counter[tuple[str, int]]) -> Counter[str]:
    total = Counter[str]()
    for (deed, _), count in deeds.items():
        total[deed] += count
    return total


def _unnoticed(folder: Path, deeds: Counter[tuple[str, int]]) -> Iterator[str]:
    """Each deed fails an episode of its seed."""
    failed = Counter(each.seed for each in held.read(folder) if each.slot == held.PLACE and each.failed)
    for (deed, seed), count in deeds.items():
        if failed[seed] < count:
            yield f"seed {seed}: {deed} was done {count} times, and {failed[seed]} episodes failed"
