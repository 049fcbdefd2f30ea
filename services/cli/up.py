"""Start and end of the stack of one machine (`millrace up`, `millrace down`), in the foreground or detached."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from services.cli.doctor import refuse_problems
from services.cli.stack.plan import plan_stack
from services.cli.stack.runtime import remember_segments, remove_leftovers, runtime_of
from services.cli.stack.state import home_lock, remove_state, write_state
from services.cli.stack.supervisor import Supervisor, WrongSettingError
from services.common.config.settings import load_settings
from services.common.errors import DeadlineExceeded
from services.common.service.process_tree import created_at, is_same, kill_tree
from services.common.service.stack_state import ProcessState, UpState, read_state

DETACH_TIMEOUT_S = 300.0
DOWN_TIMEOUT_S = 180.0
LEFTOVER_GRACE_S = 10.0
POLL_INTERVAL_S = 0.1

Say = Callable[[str], None]


def run_up(home: Path, *, servers: int, gateway_port: int, metrics_base: int | None, say: Say) -> None:
    """Runs the stack until a signal ends it. Raises ConfigError when it is up already, WrongSettingError as `Supervisor.run`."""
    os.environ["MILLRACE_HOME"] = str(home)
    settings = load_settings()
    with ExitStack() as resources:
        resources.enter_context(home_lock(home))
        _end_leftovers(home, say)
        refuse_problems(home)
        runtime = resources.enter_context(runtime_of(home))
        stack = plan_stack(settings, runtime, servers=servers, gateway_port=gateway_port, metrics_base=metrics_base)
        state = UpState(os.getpid(), created_at(os.getpid()), stack.url, stack.redis_url, stack.token_file, ready=False)

        def changed(ready: bool, processes: dict[str, ProcessState], lost: dict[str, str]) -> None:
            write_state(home, replace(state, ready=ready, processes=processes, lost=lost))

        changed(False, {}, {})
        say(f"starting {', '.join(spec.name for spec in stack.table)} (logs: {home / 'logs'})")
        remember = partial(remember_segments, home)
        try:
            Supervisor(stack.table, home / "logs", say=say, changed=changed, remember=remember).run()
        finally:
            remove_state(home)


def detach(home: Path, arguments: list[str], say: Say) -> UpState:
    """Runs `millrace up` with these arguments in the background and waits until all is ready.

    Raises ConfigError when it is up already, WrongSettingError when it ended, DeadlineExceeded when it still starts.
    """
    with home_lock(home):
        pass  # refuses a second one here, where the user reads the error
    log_path = home / "logs" / "up.log"
    log_path.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "services.cli.main", "up", "--home", str(home), *arguments]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    deadline, state = time.monotonic() + DETACH_TIMEOUT_S, None
    while time.monotonic() < deadline:
        state = read_state(home)
        if state is not None and state.pid == process.pid and state.ready:
            return state
        if process.poll() is not None:
            output = log_path.read_text().strip()[-2000:]
            raise WrongSettingError(f"millrace ended before it was ready (log: {log_path}):\n{output}")
        time.sleep(POLL_INTERVAL_S)
    for name, cause in (state.lost if state is not None else {}).items():
        say(f"{name}: {cause}")
    say(f"it goes on trying; its log is {log_path}, and `millrace down` ends it")
    raise DeadlineExceeded(f"millrace was not ready within {DETACH_TIMEOUT_S:.0f} s")


def run_down(home: Path, say: Say, *, grace_s: float = LEFTOVER_GRACE_S) -> None:
    """Ends the stack of a home and waits for its end; also ends processes that a killed supervisor left.

    Raises DeadlineExceeded when it did not drain in time, and was killed.
    """
    state = read_state(home)
    if state is None:
        say(f"nothing is up in {home}")
        return
    if not state.is_alive():
        with home_lock(home):
            _end_leftovers(home, say, grace_s)
            remove_leftovers(home)
            remove_state(home)
        return
    say(f"draining (process {state.pid})")
    os.kill(state.pid, signal.SIGTERM)
    deadline = time.monotonic() + DOWN_TIMEOUT_S
    while state.is_alive():
        if time.monotonic() > deadline:
            latest = read_state(home) or state
            os.kill(state.pid, signal.SIGKILL)
            _kill_leftovers(latest)
            remove_leftovers(home)
            remove_state(home)
            raise DeadlineExceeded(f"millrace in {home} did not drain within {DOWN_TIMEOUT_S:.0f} s: killed")
        time.sleep(POLL_INTERVAL_S)
    say("down")


def _end_leftovers(home: Path, say: Say, grace_s: float = LEFTOVER_GRACE_S) -> None:
    """Waits for the processes of a killed supervisor, then kills the rest: two learners must never share a home."""
    state = read_state(home)
    if state is None or state.is_alive():
        return
    deadline = time.monotonic() + grace_s
    while leftovers := _leftovers(state):
        if time.monotonic() > deadline:
            say(f"killing what an earlier `millrace up` left: {', '.join(leftovers)}")
            _kill_leftovers(state)
            return
        time.sleep(POLL_INTERVAL_S)


def _leftovers(state: UpState) -> list[str]:
    return [name for name, process in state.processes.items() if is_same(process.pid, process.created)]


def _kill_leftovers(state: UpState) -> None:
    for name in _leftovers(state):
        kill_tree(state.processes[name].pid)
