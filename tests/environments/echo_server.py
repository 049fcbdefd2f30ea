"""An OpenEnv server with the fields of OpenEnv's echo environment, which its package does not include.

Its arguments are a port and how many sessions it has at once. The server, the protocol and the base classes are the package's.
"""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

REWARD_PER_CHAR = 0.1


class EchoAction(Action):  # type: ignore[misc]  # an untyped package
    """What is to be said again."""

    message: str


class EchoObservation(Observation):  # type: ignore[misc]
    """What was said."""

    echoed_message: str
    message_length: int = 0


class Echo(Environment):  # type: ignore[misc]
    """Says every message again, with a reward by its length; `bye` ends the episode."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()

    def reset(self, seed: int | None = None, **_: Any) -> EchoObservation:
        """Begins an episode; its first words name the seed."""
        self._state = State(step_count=0)
        return EchoObservation(echoed_message=f"Echo environment ready, {seed}!", reward=0.0)

    def step(self, action: EchoAction, **_: Any) -> EchoObservation:
        """Says it again."""
        self._state.step_count += 1
        length, text = len(action.message), action.message
        return EchoObservation(
            echoed_message=text, message_length=length, reward=REWARD_PER_CHAR * length, done=text == "bye"
        )

    @property
    def state(self) -> State:
        """Of the episode."""
        return self._state


if __name__ == "__main__":
    own_port, sessions = map(int, sys.argv[1:])
    app = create_fastapi_app(Echo, EchoAction, EchoObservation, max_concurrent_envs=sessions)
    uvicorn.run(app, host="127.0.0.1", port=own_port, log_level="warning")
