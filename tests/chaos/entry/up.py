"""`python -m tests.chaos.entry.up HOME [--servers N] [--learners N]`: `millrace up` with every service replaced by its entry here.

Told by the environment: MILLRACE_CHAOS_REDIS_URL, under which the services reach Redis (through a proxy, say); MILLRACE_CHAOS_PRELOAD, a
library that is put before each process's own calls, and MILLRACE_CHAOS_CLOCKS, a folder with a clock for each; MILLRACE_CHAOS_BLIND, not to
notice what stands still, nor what is left of the dead; MILLRACE_CHAOS_BESIDE, that there are hostile jobs: should they use up the machine's
memory, the kernel ends this stack's processes, and not its neighbours'.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from services.cli import up
from services.cli.stack import children, supervisor
from services.cli.stack.health import HEALTH_TIMEOUT_S, READY_TIMEOUT_S, HealthMonitor, http_probe
from services.cli.stack.plan import Stack, plan_stack
from services.cli.stack.supervisor import ProcessSpec, WrongSettingError
from services.common.errors import ConfigError
from services.common.service.process_tree import die_with_parent
from tests.chaos.stack import BESIDE, BLIND, CLOCK, CLOCKS, PRELOAD, PROXIED_URL

QUICK_DEATH_S = 1.0
"""Faults come closer to each other than the 20 s after which the supervisor counts a death as a new one."""


FIRST_TO_GO = "500"
"""Of up to 1000: whom the kernel ends first when there is no memory left."""


class Blind(HealthMonitor):
    """Notices nothing."""

    def fault(self) -> str | None:
        """All is well."""
        return None


def substitute(spec: ProcessSpec) -> ProcessSpec:
    """The row of the table with the service's chaos entry."""
    environment = dict(spec.env)
    if library := os.environ.get(PRELOAD):
        environment |= {"LD_PRELOAD": library, CLOCK: f"{os.environ[CLOCKS]}/{spec.name}"}
    if spec.name == "redis":
        return replace(spec, env=environment)
    if proxied := os.environ.get(PROXIED_URL):
        environment["REDIS_URL"] = proxied
    argv = tuple(word.replace("services.", "tests.chaos.entry.") for word in spec.argv)
    return replace(spec, argv=argv, env=environment)


def another_learner(stack: Stack, number: int) -> ProcessSpec:
    """One more learner agent, as on another machine: it takes the jobs that the others leave."""
    first = next(spec for spec in stack.table if spec.name == "learner-0")
    name, port = f"learner-{number}", children.free_port()
    base, environment = f"http://127.0.0.1:{port}", dict(first.env or {})
    return replace(
        first, name=name, port=port, ready=http_probe(f"{base}/readyz", READY_TIMEOUT_S),
        healthy=http_probe(f"{base}/healthz", HEALTH_TIMEOUT_S),
        env=environment | {"MILLRACE_WORKER": name, "MILLRACE_METRICS_PORT": str(port)},
    )  # fmt: skip


def say(text: str) -> None:
    """What the supervisor tells, with the time."""
    sys.stdout.write(f"{time.time():.2f} {text}\n")


def main() -> int:
    """Runs until a signal, or the harness's end, ends it."""
    die_with_parent(signal.SIGTERM)
    parser = argparse.ArgumentParser()
    parser.add_argument("home", type=Path)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--learners", type=int, default=1)
    arguments = parser.parse_args()
    supervisor.QUICK_DEATH_S = QUICK_DEATH_S
    if BESIDE in os.environ:
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(FIRST_TO_GO)
    if BLIND in os.environ:
        vars(supervisor)["kill_orphans"] = lambda _mine: set()
        vars(supervisor)["HealthMonitor"] = Blind

    def plan(*args: Any, **options: Any) -> Stack:
        stack = plan_stack(*args, **options)
        more = [another_learner(stack, number) for number in range(1, arguments.learners)]
        return replace(stack, table=tuple(substitute(spec) for spec in (*stack.table, *more)))

    vars(up)["plan_stack"] = plan
    try:
        up.run_up(
            arguments.home,
            servers=arguments.servers,
            gateway_port=0,
            metrics_base=None,
            say=say,
        )
    except (ConfigError, WrongSettingError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
