"""State of the stack of `millrace up` (`<home>/up.json`), for the other commands; and the lock against a second stack in one home."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from services.common.errors import ConfigError
from services.common.service.lost_processes import UP_FILE
from services.common.service.process_tree import is_same

LOCK = "up.lock"


@dataclass(frozen=True, slots=True)
class ProcessState:
    """One process of the stack."""

    pid: int
    created: float
    """Unix seconds: distinguishes the process from a later one with the same id."""
    port: int | None
    """Of its HTTP: /healthz, /readyz, /metrics."""
    ready: bool
    restarts: int


@dataclass(frozen=True, slots=True)
class UpState:
    """A running stack."""

    pid: int
    """The supervisor's."""
    created: float
    url: str
    """The gateway's."""
    redis_url: str
    token_file: str | None
    """None when the token was given as MILLRACE_TOKEN."""
    ready: bool
    """Whether every process has become ready."""
    processes: dict[str, ProcessState] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    """Processes that the stack runs without, and the cause; each is started again every minute."""

    def is_alive(self) -> bool:
        """Whether its supervisor still runs."""
        return is_same(self.pid, self.created)


_STATE = TypeAdapter(UpState)


def read_state(home: Path) -> UpState | None:
    """The state that was written last, or None; the stack may have died since (see `UpState.is_alive`)."""
    try:
        return _STATE.validate_json((home / UP_FILE).read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


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


def require_state(home: Path) -> UpState:
    """The state of the stack that runs in a home. Raises ConfigError when none does."""
    state = read_state(home)
    if state is None or not state.is_alive():
        raise ConfigError(f"nothing is up in {home}: start it with `millrace up`, or name a gateway with --url")
    return state
