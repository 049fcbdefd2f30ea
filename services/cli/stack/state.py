"""Record of the stack of `millrace up`, which `services.common.service.stack_state` reads; and the lock against a second one in a home."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from services.common.errors import ConfigError
from services.common.service.lost_processes import UP_FILE
from services.common.service.stack_state import UpState, read_state

LOCK = "up.lock"


def write_state(home: Path, state: UpState) -> None:
    """Replaces the whole file; only its owner can read it."""
    temporary = home / f".{UP_FILE}.{os.getpid()}"
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(asdict(state), file, indent=2)
    temporary.replace(home / UP_FILE)


def remove_state(home: Path) -> None:
    """Removes the file."""
    (home / UP_FILE).unlink(missing_ok=True)


@contextmanager
def home_lock(home: Path) -> Iterator[None]:
    """Holds the home's lock, which the system releases however the process ends. Raises ConfigError when it is held."""
    home.mkdir(parents=True, exist_ok=True)
    with (home / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            state = read_state(home)
            holder = f"{home} (process {state.pid}, {state.url})" if state else str(home)
            remedy = "end it with `millrace down`, or choose another --home"
            raise ConfigError(f"millrace is already up in {holder}: {remedy}") from None
        yield
