"""A whole stack of real service processes under the real supervisor, which the harness may hurt."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from millrace.connection import find_token
from millrace.gateway import GatewayClient, GatewayError
from millrace.records import ENDED
from services.cli.up import run_down
from services.common.service.process_tree import is_running
from services.common.service.stack_state import UpState, read_state
from tests.chaos.job import furnish

ROOT = Path(__file__).parents[2]
PROXIED_URL = "MILLRACE_CHAOS_REDIS_URL"
PRELOAD = "MILLRACE_CHAOS_PRELOAD"
CLOCKS = "MILLRACE_CHAOS_CLOCKS"
CLOCK = "MILLRACE_CHAOS_CLOCK"
BLIND = "MILLRACE_CHAOS_BLIND"
SECOND = "MILLRACE_CHAOS_SECOND"
BESIDE = "MILLRACE_CHAOS_BESIDE"
"""Hostile jobs run beside a good one, a token of which takes so many seconds: see tests/chaos/hostile.py."""
REAL = "MILLRACE_CHAOS_REAL"
"""Hostile jobs get a real engine and real ranks."""
GOOD = "good"
"""Name of the good job beside hostile ones."""
START_S = 600.0
"""On a machine that others use at the same time; 20 s on an idle one."""
LOOK_S = 0.05
TARGETS = ("gateway", "rollout", "reward", "rank", "weights", "learner", "redis")
"""What can be killed: `rank` is a learner rank, `weights` the process that serves its weights, `learner` its agent."""

_NAMES = {"rollout": "rollout-0", "reward": "reward-0", "learner": "learner-0", "environment": "environment-0"}


class ChaosError(Exception):
    """The stack did not do what every stack must: it gave up, or stood still for longer than any fault explains."""


class Stack:
    """A running stack in a home of its own. Use it as a context manager."""

    def __init__(
        self, home: Path, *, servers: int = 1, learners: int = 1, environment: Mapping[str, str] | None = None
    ) -> None:
        """Starts nothing yet."""
        self.home = home
        self.folder = home / "chaos"
        self._counts = ["--servers", str(servers), "--learners", str(learners)]
        self._environment = dict(environment or {})
        self._up: subprocess.Popen[bytes] | None = None
        self._client: GatewayClient | None = None

    def __enter__(self) -> Self:
        """Furnishes the home and waits until all is ready."""
        furnish(self.home)
        (self.folder / "fail").mkdir(parents=True)
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Takes everything down; what was killed or stopped too."""
        self.stop()

    def start(self) -> None:
        """Starts the supervisor and waits until every process is ready.

        Raises:
            ChaosError: they did not become ready.
        """
        log = self.home / "logs" / "up.log"
        log.parent.mkdir(exist_ok=True)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MILLRACE_", "REDIS_"))}
        environment = inherited | {"MILLRACE_MIN_MEMORY_GIB": "0", "MILLRACE_MIN_FREE_GIB": "0"} | self._environment
        with log.open("ab") as output:
            self._up = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.entry.up", str(self.home), *self._counts],
                cwd=ROOT, env=environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        self.wait(self._is_ready, "the stack to be ready", START_S)
        self._client = GatewayClient(self.state.url, find_token(self.state.token_file), timeout_s=10.0)

    def _is_ready(self) -> bool:
        """Whether this supervisor says so, and not one before it that was killed."""
        state = read_state(self.home)
        return self._up is not None and state is not None and state.pid == self._up.pid and state.ready

    def stop(self) -> None:
        """Wakes what was stopped, then takes everything down."""
        for process in self.processes():
            _signal(process, signal.SIGCONT)
        run_down(self.home, lambda _: None)
        if self._up is not None:
            self._up.wait(30.0)

    def kill_everything(self) -> None:
        """kill -9 of the supervisor and of every process below it, at once: a power cut. `start` comes next."""
        doomed = self.processes()
        if self._up is not None:
            self._up.kill()
            self._up.wait()
        for process in doomed:
            _signal(process, signal.SIGKILL)
        psutil.wait_procs(doomed, timeout=10.0)

    @property
    def state(self) -> UpState:
        """What the supervisor says of itself."""
        state = read_state(self.home)
        if state is None:
            raise ChaosError(f"the supervisor is gone: {self.tail('up')}")
        return state

    @property
    def client(self) -> GatewayClient:
        """A client of the gateway."""
        if self._client is None:
            raise ChaosError("the stack was not started")
        return self._client

    def submit(self, spec: dict[str, Any], idempotency_key: str) -> str:
        """The id of a new job. A gateway that has just started answers when it has imported what the checks need."""
        with GatewayClient(self.state.url, find_token(self.state.token_file)) as client:
            return str(client.submit(spec, idempotency_key=idempotency_key)["id"])

    @property
    def alive(self) -> bool:
        """Whether the supervisor runs."""
        return self._up is not None and self._up.poll() is None

    def processes(self) -> list[psutil.Process]:
        """Every process below the supervisor."""
        if self._up is None:
            return []
        try:
            return psutil.Process(self._up.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def find(self, target: str, rank: int = 0) -> psutil.Process | None:
        """The present process of a target, or None while there is none. The processes of a rank are below its agent."""
        try:
            if target not in {"rank", "weights"}:
                process = psutil.Process(self.state.processes[_NAMES.get(target, target)].pid)
                return process if is_running(process) else None
            agent = psutil.Process(self.state.processes["learner-0"].pid)
            wanted = partial(_is_rank, rank=rank) if target == "rank" else _is_weights
            return next((child for child in agent.children(recursive=True) if wanted(child)), None)
        except (psutil.Error, KeyError):
            return None

    def job(self, job_id: str) -> dict[str, Any] | None:
        """The job's record, or None while the gateway cannot tell."""
        try:
            return self.client.job(job_id)
        except GatewayError as error:
            if error.passing:
                return None
            raise

    def step(self, job_id: str) -> int | None:
        """Steps done, or None while the gateway cannot tell."""
        record = self.job(job_id)
        if record is not None and record["state"] == "failed":
            raise ChaosError(f"job {job_id} failed: {record['cause']}")
        return None if record is None else int(record["step"])

    def wait(self, until: Callable[[], bool], what: str, timeout_s: float) -> float:
        """Waits for something; the seconds it took.

        Raises:
            ChaosError: it did not come, or the supervisor gave up.
        """
        started = time.monotonic()
        while not until():
            if self._up is not None and self._up.poll() is not None:
                raise ChaosError(f"the supervisor ended while waiting for {what}: {self.tail('up')}")
            if time.monotonic() - started > timeout_s:
                raise ChaosError(f"waited {timeout_s:.0f} s for {what}\n{self.tail()}")
            time.sleep(LOOK_S)
        return time.monotonic() - started

    def wait_for_step(self, job_id: str, beyond: int, timeout_s: float = 120.0) -> float:
        """Waits until the job has done more steps than `beyond`, or has ended; the seconds it took."""

        def moved() -> bool:
            record = self.job(job_id)
            if record is None:
                return False
            if record["state"] == "failed":
                raise ChaosError(f"job {job_id} failed: {record['cause']}\n{self.tail()}")
            return int(record["step"]) > beyond or record["state"] in ENDED

        return self.wait(moved, f"a step beyond {beyond}", timeout_s)

    def wait_for_end(self, job_id: str, timeout_s: float) -> dict[str, Any]:
        """Waits until the job has ended; its record."""
        self.wait(lambda: (self.job(job_id) or {}).get("state") in ENDED, f"the end of job {job_id}", timeout_s)
        return self.client.job(job_id)

    def said(self, name: str, words: str) -> int:
        """How often a process has logged these words."""
        return (self.home / "logs" / f"{name}.log").read_text(errors="replace").count(words)

    def tail(self, name: str = "*", size: int = 2500) -> str:
        """The ends of the logs."""
        files = sorted((self.home / "logs").glob(f"{name}.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-size:]}" for path in files)


def _is_rank(process: psutil.Process, rank: int) -> bool:
    try:
        line = process.cmdline()
        return (
            line[-1:] == ["tests.chaos.entry.rank"]
            and "services.learner.ranks.launch" not in line
            and (process.environ().get("RANK") == str(rank))
        )
    except psutil.Error:
        return False


def _is_weights(process: psutil.Process) -> bool:
    try:
        return process.cmdline()[-1:] == ["tests.chaos.entry.weights"]
    except psutil.Error:
        return False


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return
