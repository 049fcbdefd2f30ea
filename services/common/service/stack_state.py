"""State of a local stack, as `millrace up` records it in `<home>/up.json`: where its gateway answers, and which processes run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from services.common.errors import ConfigError
from services.common.service.lost_processes import UP_FILE
from services.common.service.process_tree import is_same


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


def require_state(home: Path) -> UpState:
    """The state of the stack that runs in a home. Raises ConfigError when none does."""
    state = read_state(home)
    if state is None or not state.is_alive():
        raise ConfigError(
            f"nothing is up in {home}: start it with `millrace up`, or name a gateway by its URL (--url, MILLRACE_URL)"
        )
    return state
