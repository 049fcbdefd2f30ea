"""Runs the supervisor over stand-ins: drive.py HOME NAME:STAGE:MODE[:DRAIN_TIMEOUT_S] …, state in HOME/up.json, what it says on stdout.

MODE is one of stand_in.py, or `mute`: it never says whether it is ready.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from services.cli.stack import supervisor
from services.cli.stack.children import free_port
from services.cli.stack.health import HEALTH_TIMEOUT_S, READY_TIMEOUT_S, http_probe
from services.cli.stack.state import home_lock, write_state
from services.cli.stack.supervisor import ProcessSpec, Supervisor
from services.common.errors import MillraceError
from services.common.service import watchdog
from services.common.service.process_tree import created_at
from services.common.service.stack_state import ProcessState, UpState

STAND_IN = Path(__file__).parent / "stand_in.py"
MUTE_S = 20.0


def mute(_pid: int) -> str:
    """As of a process that takes connections and does not answer."""
    time.sleep(MUTE_S)
    return "no answer"


def spec(home: Path, name: str, stage: str, mode: str, drain_timeout_s: str = "2") -> ProcessSpec:
    port = free_port()
    base = f"http://127.0.0.1:{port}"
    ready = mute if mode == "mute" else http_probe(f"{base}/readyz", READY_TIMEOUT_S)
    return ProcessSpec(
        name=name,
        argv=(sys.executable, str(STAND_IN), name, str(port), str(home / "notes"), "0.3", mode),
        env=os.environ | {"TMPDIR": str(home / "tmp" / name)},
        stage=int(stage),
        ready=ready,
        healthy=http_probe(f"{base}/healthz", HEALTH_TIMEOUT_S),
        start_timeout_s=5.0 if mode == "unready" else 30.0,
        drain_timeout_s=float(drain_timeout_s),
        port=port,
        temporary=home / "tmp" / name,
    )


def main() -> None:
    home = Path(sys.argv[1])
    supervisor.BACK_OFF_S = (0.1, 0.1, 0.2)
    supervisor.LOST_RETRY_S = 1.0
    watchdog.PERIOD_S = 1.0
    state = UpState(os.getpid(), created_at(os.getpid()), "http://x", "redis://x", None, ready=False)

    def changed(ready: bool, processes: dict[str, ProcessState], lost: dict[str, str]) -> None:
        write_state(home, replace(state, ready=ready, processes=processes, lost=lost))

    def say(text: str) -> None:
        print(text, flush=True)  # noqa: T201  the test reads it

    try:
        with home_lock(home):
            table = [spec(home, *row.split(":")) for row in sys.argv[2:]]
            Supervisor(table, home / "logs", say=say, changed=changed).run()
    except MillraceError as error:
        say(f"{type(error).__name__}: {error}")
        sys.exit(1)


if __name__ == "__main__":
    main()
