"""Types of an episode's stream: what an environment says, and its failure."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from services.common.errors import MillraceError
from services.common.streams.types import Message, Task


class Reason(StrEnum):
    """Why an episode failed; the label of a metric. The first ones are the service's own words (proto/environment.proto)."""

    CONFIG = "config"
    """There is no such environment, or it refuses its settings: it would fail again."""
    NO_PLACE = "no_place"
    """Or no server was there in time."""
    UNAVAILABLE = "unavailable"
    """What it needs is away or full for the moment, as it says itself."""
    TIMEOUT = "timeout"
    DIED = "died"
    """It ended its process, or needed more memory than it may have."""
    KILLED = "killed"
    """Its process was ended or stopped from outside."""
    BAD_OBSERVATION = "bad_observation"
    ERROR = "error"
    """It raised one, or broke the protocol."""
    SILENT = "silent"
    """The server did not answer in time, though it ends every wait itself."""
    LOST = "lost"
    """The server cannot be reached any more, or ended the stream."""


class EnvironmentFailed(MillraceError):  # noqa: N818  named after what happened
    """An environment did not answer, or not with what can be used; never a reward. The message names the environment."""

    def __init__(self, message: str, *, permanent: bool = False, reason: Reason = Reason.ERROR) -> None:
        """`permanent`: it would fail again."""
        super().__init__(message)
        self.permanent, self.reason = permanent, reason


@dataclass(frozen=True, slots=True)
class Observation:
    """What an environment says at the start, or to a reply."""

    messages: Sequence[Message]
    """Roles `user` and `tool`; at the start also `system`."""
    done: bool = False
    reward: float | None = None
    """Of the whole episode where it is done, else of the turn that was answered."""
    accuracy: float | None = None
    detail: str = ""


class World(Protocol):
    """One episode. Each call raises EnvironmentFailed, at the latest after the task's `step_timeout_s`."""

    async def reset(self) -> Observation:
        """Begins it; the first call."""
        ...

    async def step(self, reply: str) -> Observation:
        """The environment's answer to a turn of the policy."""
        ...


class Worlds(Protocol):
    """Environments."""

    def episode(self, task: Task) -> AbstractAsyncContextManager[World]:
        """An episode of the task's environment, which ends with the context, however that is left."""
        ...
