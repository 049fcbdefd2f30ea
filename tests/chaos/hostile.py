"""Hostile jobs beside a good one: each ends with a cause within its limit, and the good one does not notice.

good job ──► its learner ──► rollout-0, where a token takes its time: the job waits for its engine, as jobs do, and not for the cores
hostile jobs, some at once ──► two other learners ──► rollout-1, rollout-2             shared: gateway, Redis, reward-0, the machine

A job that cannot be ended blocks its learner: it is a violation, and the others go on with a new stack.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

from services.common.service.process_tree import adopt_orphans, family, kill_tree
from tests.chaos.campaign import ENDLESS, Campaign, campaign
from tests.chaos.faults import Options
from tests.chaos.grammar import verifiers
from tests.chaos.grammar.cases import ENGINE_TABLES, TABLES, Case, draw
from tests.chaos.guest import Guest, Interrupted, Stay, Stuck, client_of
from tests.chaos.job import job_spec
from tests.chaos.result import Result
from tests.chaos.stack import BESIDE, GOOD, REAL, ChaosError, Stack

HOSTILE_LEARNERS = 2
"""And as many rollout servers: a job that makes no step has its minute or two with them before it is given up."""
AT_ONCE = 5
"""Hostile jobs under way at a time."""
TOKEN_S = 0.5
MEASURE_S = 20.0
MIN_PACE = 0.9
LOOK_S = 0.5
BUSY_SHARE = 0.5
"""Of one core: what still computes so much when all jobs have ended computes for nobody."""
SETTLE_S, BUSY_LOOK_S = 30.0, 3.0
MAX_GROWTH_BYTES = {"gateway": 384 * 1024**2, "redis": 256 * 1024**2}
"""Of the process itself, at any moment."""
GUARDED = ("gateway", "redis", "reward-0", "rollout-0")
"""What the good job needs, besides its learner: none of these may be started again."""
MAX_PROCESSES, MIN_AVAILABLE_BYTES = 120, 2 * 1024**3
"""A stack that has more processes, or leaves the machine less memory, is killed at once: it may have neighbours."""
MAX_LOG_BYTES = 64 * 1024**2
"""Of one service's log: what a job's code prints must not fill the disk."""
MAX_STACKS = 25


@dataclass(frozen=True, slots=True)
class Paces:
    """How the good job's pace is made, measured and judged."""

    token_s: float = TOKEN_S
    measure_s: float = MEASURE_S
    """Alone, before and after; beside hostile jobs at least so long."""
    least_share: float = MIN_PACE
    """Of its pace alone, that must be left beside hostile jobs."""


def hostile(options: Options, cases: Sequence[Case] | None = None, paces: Paces | None = None) -> Result:
    """The first `count` cases; or the one that `only` names; or those that are given."""
    if cases is None:
        tables = ENGINE_TABLES if options.real else tuple(TABLES)
        numbers = range(options.count) if options.only is None else (options.only,)
        cases = [draw(options.seed, number, tables) for number in numbers]
    total, paces = (
        Result("hostile jobs" + (", real engine and ranks" if options.real else ""), 0, options.seed),
        paces or Paces(),
    )
    started, waiting, stays = time.monotonic(), list(cases), Stays(options.home / "cases.jsonl", total)
    environment = {BESIDE: str(paces.token_s), **verifiers.install(options.home / "verifiers")}
    environment |= {REAL: "1"} if options.real else {}
    with nothing_left_behind(total):
        for number in range(MAX_STACKS):
            if waiting:
                evening = Evening(options.home / str(number), options.seed, environment, stays, paces)
                try:
                    waiting = evening.run(waiting)
                except ChaosError as error:
                    stays.wrong(f"stack {number}: {error}")
                    break
    total.violations += [f"{case} never had its turn" for case in waiting]
    total.seconds = time.monotonic() - started
    total.extra["ended"] = dict(stays.ends)
    return total


class Stays:
    """What became of all hostile jobs, over all stacks."""

    def __init__(self, path: Path, total: Result) -> None:
        """Notes each in a line of `path`, for who looks into a violation."""
        self.ends: Counter[str] = Counter()
        self._path, self._total = path, total
        self._lock = threading.Lock()

    def add(self, stay: Stay) -> None:
        """One has ended; or never will."""
        line = {
            "case": str(stay.case),
            "end": stay.end,
            "cause": stay.cause[:500],
            "s": round(stay.seconds, 1),
            "wrong": stay.violations,
        }
        with self._lock:
            self.ends[stay.end or "no end"] += 1
            self._total.count += 1
            self._total.violations += stay.violations
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def wrong(self, what: str) -> None:
        """Notes what is not one job's fault alone."""
        with self._lock:
            self._total.violations.append(what)

    def merge(self, good: Result) -> None:
        """Adds what the good job of one stack came to."""
        with self._lock:
            self._total.violations += good.violations
            self._total.groups = dict(Counter(self._total.groups) + Counter(good.groups))
            for name, value in good.extra.items():
                known = self._total.extra.get(name)
                self._total.extra[name] = known + value if isinstance(known, int) and isinstance(value, int) else value


class Evening:
    """One stack with its good job and its hostile guests, until all have been, or one does not leave."""

    def __init__(self, home: Path, seed: int, environment: dict[str, str], stays: Stays, paces: Paces) -> None:
        """Starts nothing yet."""
        self._home, self._seed, self._environment, self._stays = home, seed, environment, stays
        self._paces = paces
        self._halted = threading.Event()
        self._under_way: dict[int, Case] = {}
        self._again: list[Case] = []
        self._todo: queue.SimpleQueue[Case] = queue.SimpleQueue()

    def run(self, cases: Sequence[Case]) -> list[Case]:
        """The cases that are left over: those that never had their turn here."""
        spec = job_spec(steps=ENDLESS) | {"name": GOOD}
        options = {"servers": 1 + HOSTILE_LEARNERS, "learners": 1 + HOSTILE_LEARNERS, "environment": self._environment}
        with campaign(self._home, "the good job", self._seed, spec=spec, **options) as running:
            before = self._alone(running)
            watch = Watch(running, self)
            beside = self._entertain(running, cases)
            watch.stop()
            if running.stack.alive:
                self._see_after(running, before, beside)
                running.result.extra |= watch.told()
                running.finish()
        self._stays.merge(running.result)
        left = list(self._again)
        with contextlib.suppress(queue.Empty):
            while True:
                left.append(self._todo.get_nowait())
        return left

    def notice(self, what: str, *, end: bool = False) -> None:
        """Something that one of those who are under way has done; with `end` nothing more can be tried here."""
        self._stays.wrong(f"{what}, beside: {'; '.join(map(str, self._under_way.values())) or 'nobody'}")
        if end:
            self._halted.set()

    def _entertain(self, running: Campaign, cases: Sequence[Case]) -> float:
        """All cases, some at once; the good job's steps per second meanwhile."""
        for case in cases:
            self._todo.put(case)
        pace = Pace(running)
        with ThreadPoolExecutor(AT_ONCE, "guest") as hands:
            for hand in [hands.submit(self._host, running.stack) for _ in range(AT_ONCE)]:
                hand.result()
        return pace.end(0.0 if self._halted.is_set() else self._paces.measure_s)

    def _host(self, stack: Stack) -> None:
        """One after the other, until there are no more."""
        while not self._halted.is_set():
            try:
                case = self._todo.get_nowait()
            except queue.Empty:
                return
            guest = Guest(stack.home, client_of(stack), case, self._halted)
            self._under_way[case.number] = case
            try:
                self._stays.add(guest.visit())
            except Stuck:
                self._stays.add(guest.stay)
                self._halted.set()
            except Interrupted:
                if stack.alive:  # else one of those who were under way has ended it, and nobody knows which
                    self._again.append(case)
                else:
                    self._stays.add(guest.stay)
            finally:
                del self._under_way[case.number]

    def _alone(self, running: Campaign) -> float:
        return Pace(running).end(self._paces.measure_s)

    def _see_after(self, running: Campaign, before: float, beside: float) -> None:
        """Is anybody still there, and how fast is the good job alone again?"""
        if self._halted.is_set():
            return
        for busy in _still_busy(running.stack):
            self._stays.wrong(f"{busy}, {SETTLE_S:.0f} s after the last hostile job has ended")
        alone = (before + self._alone(running)) / 2  # a machine is not the same all the time
        running.result.extra |= {"steps_per_min": round(60 * alone, 1), "steps_per_min_beside": round(60 * beside, 1)}
        if beside < self._paces.least_share * alone:
            self._stays.wrong(
                f"the good job did {60 * beside:.1f} steps a minute beside hostile ones, {60 * alone:.1f} alone"
            )


class Pace:
    """The good job's steps per second, from one step's end to another's."""

    def __init__(self, running: Campaign) -> None:
        """Begins with the end of the next step."""
        self._running = running
        self._first = self._next_step()
        self._began = time.monotonic()

    def end(self, least_s: float) -> float:
        """The steps per second since, over `least_s` seconds at least."""
        time.sleep(max(0.0, least_s - (time.monotonic() - self._began)))
        last = self._next_step()
        return (last - self._first) / (time.monotonic() - self._began)

    def _next_step(self) -> int:
        stack, job_id = self._running.stack, self._running.job_id
        now = stack.step(job_id) or 0
        stack.wait(lambda: (stack.step(job_id) or 0) > now, "a step of the good job", 120.0)
        return stack.step(job_id) or 0


class Watch:
    """Looks at what the good job needs while there are guests: nothing of it may be started again, nor grow without bound."""

    def __init__(self, running: Campaign, evening: Evening) -> None:
        """Looks from now on."""
        self._stack, self._evening = running.stack, evening
        record = running.stack.client.job(running.job_id)
        self._guarded = (*GUARDED, str(record["learner"]))
        self._rank = _rank_of(running.stack, str(record["learner"]), running.job_id)
        self._restarts = self._restarted()
        self._memory = {name: self._resident(name) for name in MAX_GROWTH_BYTES}
        self._grown = dict.fromkeys(MAX_GROWTH_BYTES, 0)
        self._told: set[str] = set()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Looks no more."""
        self._stopped.set()
        self._thread.join(10.0)

    def told(self) -> dict[str, dict[str, int]]:
        """How much the watched processes have grown at most, MiB."""
        return {"grown by MiB": {name: size >> 20 for name, size in self._grown.items()}}

    def _look(self) -> None:
        while not self._stopped.wait(LOOK_S):
            if not self._stack.alive:
                self._evening.notice("the stack went down", end=True)
                return
            if trouble := self._too_much():
                self._stack.kill_everything()
                self._evening.notice(trouble, end=True)
                return
            with contextlib.suppress(ChaosError, psutil.Error, KeyError):
                self._look_at_restarts()
                self._look_at_memory()

    def _too_much(self) -> str | None:
        """What the machine cannot bear, or None."""
        count, available = len(self._stack.processes()), psutil.virtual_memory().available
        if count > MAX_PROCESSES:
            return f"the stack had {count} processes"
        if available < MIN_AVAILABLE_BYTES:
            return f"the stack left {available >> 20} MiB of the machine's memory; the largest: {_largest()}"
        for log in (self._stack.home / "logs").glob("*.log"):
            if log.stat().st_size > MAX_LOG_BYTES:
                return f"{log.name} has {log.stat().st_size >> 20} MiB"
        return None

    def _look_at_restarts(self) -> None:
        now = self._restarted()
        for name, count in now.items():
            if count > self._restarts.get(name, 0):
                self._evening.notice(f"{name} was started again")
        self._restarts = now
        if self._rank is not None and not self._rank.is_running():
            self._evening.notice("the good job's rank died")
            self._rank = None

    def _look_at_memory(self) -> None:
        for name, limit in MAX_GROWTH_BYTES.items():
            self._grown[name] = max(self._grown[name], self._resident(name) - self._memory[name])
            if self._grown[name] > limit and name not in self._told:
                self._told.add(name)
                self._evening.notice(f"{name} grew by more than {limit >> 20} MiB")

    def _restarted(self) -> dict[str, int]:
        processes = self._stack.state.processes
        return {name: processes[name].restarts for name in self._guarded if name in processes}

    def _resident(self, name: str) -> int:
        return int(psutil.Process(self._stack.state.processes[name].pid).memory_info().rss)


def _largest() -> str:
    """The machine's process that takes the most memory, which need not be the stack's."""
    sizes = {process.pid: process.info for process in psutil.process_iter(["memory_info", "cmdline"])}
    pid, info = max(sizes.items(), key=lambda item: item[1]["memory_info"].rss if item[1]["memory_info"] else 0)
    return f"process {pid}, {info['memory_info'].rss >> 20} MiB: {' '.join(info['cmdline'] or [])[:200]}"


def _rank_of(stack: Stack, learner: str, job_id: str) -> psutil.Process | None:
    for process in family(stack.state.processes[learner].pid):
        with contextlib.suppress(psutil.Error):
            environment = process.environ()
            if environment.get("MILLRACE_JOB") == job_id and environment.get("RANK") == "0":
                return process
    return None


def _still_busy(stack: Stack) -> list[str]:
    """The services that compute though nobody asks them to: the good job asks little of these."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        busy = []
        hostile_servers = [f"rollout-{number}" for number in range(1, 1 + HOSTILE_LEARNERS)]
        spent = {name: _computed_s(stack, name) for name in ("gateway", "reward-0", *hostile_servers)}
        time.sleep(BUSY_LOOK_S)
        for name, before in spent.items():
            share = (_computed_s(stack, name) - before) / BUSY_LOOK_S
            if share > BUSY_SHARE:
                busy.append(f"{name} still computes on {share:.1f} cores")
        if not busy or time.monotonic() > deadline:
            return busy


def _computed_s(stack: Stack, name: str) -> float:
    """Processor time of a service and of everything below it, seconds."""
    total = 0.0
    with contextlib.suppress(psutil.Error, KeyError):
        for process in family(stack.state.processes[name].pid):
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
    return total


@contextlib.contextmanager
def nothing_left_behind(total: Result) -> Iterator[None]:
    """Processes that outlive the stacks are violations, and are ended. Orphans of the stacks become this process's children."""
    adopt_orphans()
    known = set(psutil.Process().children())
    yield
    deadline = time.monotonic() + 10.0
    while (left := _children_but(known)) and time.monotonic() < deadline:
        time.sleep(0.2)
    for process in left:
        with contextlib.suppress(psutil.Error):
            total.violations.append(f"left behind: process {process.pid}: {' '.join(process.cmdline())[:200]}")
            kill_tree(process.pid)


def _children_but(known: set[psutil.Process]) -> list[psutil.Process]:
    """This process's other children that run; those that have ended are reaped."""
    running = []
    for process in set(psutil.Process().children()) - known:
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(process.pid, os.WNOHANG)
            else:
                running.append(process)
        except (psutil.Error, ChildProcessError):
            continue
    return running
