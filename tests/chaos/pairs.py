"""Two faults at once: a random pair of those that can strike a running stack, within two seconds of each other.

pair ─► blow ─► up to 2 s ─► blow ─► both are over ─► does the job go on? ─► next pair ─► … ─► end ─► oracle
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import redis as sync_redis

from millrace.gateway import GatewayError
from services.common.redis import keys
from services.common.redis.keys import Stage
from services.common.service.process_tree import is_running, kill
from tests.chaos import failpoints
from tests.chaos.campaign import ENDLESS, Campaign, campaign
from tests.chaos.clock_fault import HOUR_S, clocks_of, move_clock
from tests.chaos.faults import Options, slay, victim
from tests.chaos.freeze import UNNOTICED_S
from tests.chaos.full import fill, mounted
from tests.chaos.garbage import MUTATIONS
from tests.chaos.job import job_spec
from tests.chaos.network import stack_url
from tests.chaos.points import UNDER_WAY
from tests.chaos.proxy import ProxyThread, server_of
from tests.chaos.result import Result
from tests.chaos.stack import PROXIED_URL, TARGETS, ChaosError

WITHIN_S = 2.0
"""The second blow falls so soon after the first."""
HOLDS_S = (0.5, 2.0, 4.0)
"""How long a fault lasts that ends by itself."""
DISK_MIB = 512
"""Of the file system below the jobs' folders: room for the journal of a whole run."""
PASSED_S = 10.0
"""A fail point that nobody comes by is taken away again."""
_NOTHING_TO_STRIKE = (ChaosError, GatewayError, psutil.Error, sync_redis.RedisError, OSError)
"""What a blow raises when the other one has taken its victim away."""


@dataclass(frozen=True, slots=True)
class Blow:
    """One fault of a pair, wholly drawn before it strikes."""

    name: str
    strike: Callable[[], None]
    """Returns when it is over."""


@dataclass(frozen=True, slots=True)
class Scene:
    """What the blows are aimed at."""

    running: Campaign
    proxy: ProxyThread
    clocks: Path
    jobs: Path
    """The file system below the jobs' folders."""
    hands: ThreadPoolExecutor
    """What strikes. Its threads outlast the stack: a supervisor that one of them started ends with that thread."""


Kind = Callable[[Scene, random.Random], Blow]


def _kill(scene: Scene, rng: random.Random) -> Blow:
    target = rng.choice(TARGETS)
    return Blow(f"kill -9 of {target}", lambda: slay(scene.running.stack, target))


def _freeze(scene: Scene, rng: random.Random) -> Blow:
    target, hold_s = rng.choice(TARGETS), rng.choice(HOLDS_S)

    def strike() -> None:
        process = victim(scene.running.stack, target)
        process.suspend()
        time.sleep(hold_s)
        process.resume()

    return Blow(f"SIGSTOP of {target} for {hold_s:g} s", strike)


def _freeze_for_ever(scene: Scene, rng: random.Random) -> Blow:
    target = rng.choice(TARGETS)

    def strike() -> None:
        process, begun = victim(scene.running.stack, target), time.monotonic()
        process.suspend()
        while is_running(process):
            if time.monotonic() - begun > UNNOTICED_S:
                scene.running.result.violations.append(
                    f"{target} stood still for {UNNOTICED_S:.0f} s, and nobody noticed"
                )
                kill([process])
            time.sleep(0.05)

    return Blow(f"SIGSTOP of {target} for ever", strike)


def _redis_restart(scene: Scene, _: random.Random) -> Blow:
    return Blow("restart of Redis", lambda: victim(scene.running.stack, "redis").send_signal(signal.SIGTERM))


def _redis_flush(scene: Scene, _: random.Random) -> Blow:
    def strike() -> None:
        with _direct(scene) as client:
            client.flushall()

    return Blow("Redis emptied", strike)


def _power_cut(scene: Scene, _: random.Random) -> Blow:
    def strike() -> None:
        scene.running.stack.kill_everything()
        scene.running.stack.start()

    return Blow("kill -9 of everything", strike)


def _die_at_point(scene: Scene, rng: random.Random) -> Blow:
    point, passes = rng.choice(UNDER_WAY), rng.randrange(3)

    def strike() -> None:
        armed, begun = failpoints.arm(scene.running.stack.folder, point, passes), time.monotonic()
        while armed.exists() and time.monotonic() - begun < PASSED_S:
            time.sleep(0.02)
        armed.unlink(missing_ok=True)

    return Blow(f"kill -9 at {point}", strike)


def _cut(scene: Scene, rng: random.Random) -> Blow:
    hold_s, share = rng.choice(HOLDS_S), rng.choice((0.03, 0.3))

    def strike() -> None:
        scene.proxy.faults.cut_reply = share
        time.sleep(hold_s)
        scene.proxy.faults.cut_reply = 0.0

    return Blow(f"{share:.0%} of Redis' replies cut for {hold_s:g} s", strike)


def _latency(scene: Scene, rng: random.Random) -> Blow:
    hold_s = rng.choice(HOLDS_S)

    def strike() -> None:
        scene.proxy.faults.latency_s = 0.25
        time.sleep(hold_s)
        scene.proxy.faults.latency_s = 0.0

    return Blow(f"500 ms to Redis for {hold_s:g} s", strike)


def _half_open(scene: Scene, rng: random.Random) -> Blow:
    hold_s = rng.choice(HOLDS_S)

    def strike() -> None:
        scene.proxy.faults.frozen = True
        time.sleep(hold_s)
        scene.proxy.break_all()
        scene.proxy.faults.frozen = False

    return Blow(f"half-open connections to Redis for {hold_s:g} s", strike)


def _garbage(scene: Scene, rng: random.Random) -> Blow:
    count, seed = rng.randrange(10, 100), rng.randrange(2**32)

    def strike() -> None:
        rng, job_id = random.Random(seed), scene.running.job_id
        with _direct(scene) as client:
            for number in range(count):
                stream = keys.stream(job_id, rng.choice(tuple(Stage)))
                entries: Any = client.xrange(stream, count=1)
                sample = (bytes(entries[0][1][b"d"]) if entries else b"") or b"\xc0"  # empty: one of these itself
                payload = MUTATIONS[rng.choice(sorted(MUTATIONS))](rng, sample)
                client.xadd(stream, {"member": f"garbage:{seed}:{number}", "d": payload})

    return Blow(f"{count} malformed entries", strike)


def _clock(scene: Scene, rng: random.Random) -> Blow:
    clock, seconds, hold_s = (
        rng.choice(sorted(scene.clocks.iterdir())),
        rng.choice((HOUR_S, -HOUR_S)),
        rng.choice(HOLDS_S),
    )

    def strike() -> None:
        move_clock(clock, seconds)
        time.sleep(hold_s)
        move_clock(clock, 0)

    return Blow(f"clock of {clock.name} {seconds:+} s for {hold_s:g} s", strike)


def _full_disk(scene: Scene, rng: random.Random) -> Blow:
    hold_s = rng.choice(HOLDS_S)

    def strike() -> None:
        ballast = scene.jobs / "ballast"
        fill(ballast)
        time.sleep(hold_s)
        ballast.unlink(missing_ok=True)

    return Blow(f"disk full below the jobs for {hold_s:g} s", strike)


KINDS: dict[str, Kind] = {
    "kill": _kill, "freeze": _freeze, "freeze for ever": _freeze_for_ever, "redis restart": _redis_restart,
    "redis flush": _redis_flush, "power cut": _power_cut, "point": _die_at_point, "cut": _cut, "latency": _latency,
    "half-open": _half_open, "garbage": _garbage, "clock": _clock, "full disk": _full_disk,
}  # fmt: skip
WEIGHTS = {"kill": 4.0, "point": 3.0, "freeze": 2.0, "power cut": 0.3}
"""How often a kind is drawn; the others once. What takes long is drawn less often."""


def pairs(options: Options, chosen: Sequence[str] = tuple(KINDS)) -> Result:
    """`count` pairs of faults of the chosen kinds, one job under all of them."""
    with contextlib.ExitStack() as held:
        scene = held.enter_context(_scene(options, chosen))
        running = scene.running
        struck: Counter[str] = Counter()
        for _ in range(options.count):
            blows = _draw(scene, chosen)
            gap_s = running.random.uniform(0.0, WITHIN_S)
            said = f"{blows[0].name}, {gap_s:.2f} s later {blows[1].name}"
            _note(scene, said)
            try:
                running.trial(_both(scene, blows, gap_s, struck), pause_s=0.3, lies_in_wait=True)
            except ChaosError as error:
                raise ChaosError(f"{said}: {error}") from error
        running.result.extra["struck"] = dict(struck)
        running.finish()
    return running.result


@contextlib.contextmanager
def _scene(options: Options, chosen: Sequence[str]) -> Iterator[Scene]:
    """A stack with one job, behind a proxy; its jobs lie on a small disk and its clocks can be moved where a chosen kind needs that."""
    home = options.home / "stack"
    clocks, jobs, environment = options.home / "clocks", home / "jobs", dict[str, str]()
    with contextlib.ExitStack() as held:
        if "full disk" in chosen:
            held.enter_context(mounted(jobs, DISK_MIB))
        if "clock" in chosen:
            environment |= clocks_of(options.home, clocks)
        hands = held.enter_context(ThreadPoolExecutor(2, "blow"))
        proxy = ProxyThread(lambda: server_of(stack_url(home)), seed=options.seed)
        held.callback(proxy.stop)
        environment[PROXIED_URL] = proxy.url
        spec = job_spec(steps=ENDLESS, interval_steps=5)
        running = held.enter_context(
            campaign(home, "pairs of faults", options.seed, spec=spec, environment=environment)
        )
        yield Scene(running, proxy, clocks, jobs, hands)


def _draw(scene: Scene, chosen: Sequence[str]) -> list[Blow]:
    """Two blows; never the power cut twice, for a stack is started once at a time."""
    rng, weights = scene.running.random, [WEIGHTS.get(name, 1.0) for name in chosen]
    while (kinds := rng.choices(list(chosen), weights, k=2)) == ["power cut"] * 2:
        pass
    return [KINDS[kind](scene, rng) for kind in kinds]


def _both(scene: Scene, blows: Sequence[Blow], gap_s: float, struck: Counter[str]) -> Callable[[], None]:
    """Strikes both blows, the second `gap_s` after the first began, and waits until both are over; counts those that found a victim."""

    def fall(blow: Blow) -> None:
        try:
            blow.strike()
            struck["blows"] += 1
        except _NOTHING_TO_STRIKE as error:
            struck["found nothing"] += 1
            _note(
                scene, f"{blow.name} found nothing to strike: {str(error).splitlines()[0] if str(error) else error!r}"
            )

    def strike() -> None:
        first = scene.hands.submit(fall, blows[0])
        time.sleep(gap_s)
        second = scene.hands.submit(fall, blows[1])
        for hand in (first, second):
            hand.result()
        scene.proxy.faults.cut_reply, scene.proxy.faults.latency_s, scene.proxy.faults.frozen = 0.0, 0.0, False

    return strike


def _note(scene: Scene, what: str) -> None:
    """For who looks into a violation: which pairs there were, and when."""
    with (scene.running.stack.home / "logs" / "pairs.log").open("a") as file:
        file.write(json.dumps([round(time.time(), 2), scene.running.result.count + 1, what]) + "\n")


def _direct(scene: Scene) -> sync_redis.Redis:
    return sync_redis.Redis.from_url(scene.running.stack.state.redis_url, socket_timeout=5.0)
